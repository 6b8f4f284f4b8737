"""Prefill throttle: prompt tokens in steps that have decode rows."""

from __future__ import annotations

import math

from core.schedule.new_token_ratio import CLIP
from core.schedule.table import SlotTable
from core.types import NDArray64

MIN_PROMPT_TOKENS = 64
"""Prompt tokens beside any number of rows: prompts always make progress."""

MEMORY = 32
"""Answers over which their usual length is averaged."""


class PrefillThrottle:
    """Spreads prompts over the steps that decoding takes anyway.

    A step of decode rows reads the weights for a few tokens each and leaves the arithmetic units idle;
    prompt tokens beside them are cheap until the step is bound by arithmetic. So a step with rows takes
    `most` tokens, rows and prompts together: rows then get tokens from steps that prompts need anyway, and
    no row waits long for its next one.

    The limit is raised to the tokens a step needs so that the waiting prompts are computed while the rows
    still run: where prompts come faster than that, small steps save nothing, and the largest are fastest.

    Measured on an H200 with Qwen3-30B-A3B, 2,048 against 8,192 tokens (bench/results/history): for 256
    callers the p99 inter-token latency falls from 106 to 43 ms, and throughput by 5% (7,094 tokens a second
    against 7,496), since a prompt token costs the same and there are more steps. Time to first token is 132
    ms against 261 for 32 callers and 116 against 173 for 512, for 1% and 0% of throughput. It is off by
    default.

    Measured on two cores (bench/results/pace-cpu.json), 8 callers with prompts of 512 tokens, 256 against
    2,048 tokens: time to first token 2.6 s against 5.5, p99 inter-token latency 0.59 s against 1.05,
    throughput 2.5% lower.

    Owner: event loop.
    """

    def __init__(self, most: int, table: SlotTable) -> None:
        """`most` 0: no limit, and `room` need not be called."""
        self.most = most
        self._table = table
        self._usual: float | None = None

    def ended(self, tokens: int) -> None:
        """Record the length of an answer: a better estimate for the next one than `max_tokens`, which many
        leave open. Answers without a token do not count."""
        if not tokens:
            return
        usual = float(tokens) if self._usual is None else self._usual
        self._usual = usual + (tokens - usual) / MEMORY

    def room(self, room: int, rows: NDArray64, rows_tokens: int, backlog: int) -> int:
        """Prompt tokens that a step with `room` tokens left may take, with `rows` slots of `rows_tokens`
        tokens decoding in it and `backlog` prompt tokens waiting."""
        if not len(rows):
            return room
        beside = max(self.most - rows_tokens, MIN_PROMPT_TOKENS)
        if beside >= min(room, backlog):
            return room
        return min(room, max(beside, math.ceil(backlog / self._steps(rows))))

    def _steps(self, rows: NDArray64) -> float:
        """Steps that the rows are likely to take still, on average and at least one."""
        table = self._table
        most = table.max_tokens[rows].clip(max=CLIP if self._usual is None else math.ceil(self._usual))
        left = most - table.made[rows] - table.in_flight[rows]
        return max(float(left.clip(min=0).mean()), 1.0)
