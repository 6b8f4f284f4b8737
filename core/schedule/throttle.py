"""How many tokens of prompts go beside rows that decode."""

from __future__ import annotations

import math

from core.schedule.new_token_ratio import CLIP
from core.schedule.table import SlotTable
from core.types import NDArray64

LEAST = 64
"""Tokens of prompts beside any number of rows: who waits moves on."""

MEMORY = 32
"""Answers over which their usual length is averaged."""


class PrefillThrottle:
    """Spreads prompts over the steps that decoding takes anyway.

    A step of decode rows reads the weights for a token each, and leaves the arithmetic idle; tokens of
    prompts beside them are cheap until arithmetic is what a step takes. So a step that has rows takes
    `most` tokens, rows and prompts together: every further step of prompts brings each row a token for which
    it would have needed a step of its own, and no row waits long for its next one.

    But never less than it takes to be through with what waits while the rows are still there: where prompts
    come faster than that, no step is saved, and the largest steps are through soonest.

    Measured on an H200, 2,048 of steps of 8,192, Qwen3-30B-A3B (bench/results/history): for 256 callers the
    slowest hundredth of gaps between tokens falls from 106 to 43 ms, and 5% of the tokens are lost (7,094 a
    second for 7,496): a token of a prompt costs as much in a step of 2,048 as in one of 8,192, and there are
    more steps. The first token of 32 callers comes after 132 ms for 261, of 512 after 116 for 173, for 1% of
    the tokens and none. So it is for who promises gaps, and no default.

    Measured on two cores (bench/results/pace-cpu.json), 8 callers with prompts of 512 tokens: 256 in place of
    2,048 bring the first token after 2.6 s for 5.5 and the slowest hundredth of gaps to 0.59 s from 1.05, and
    cost 2.5% of the tokens.

    Owner: event loop.
    """

    __slots__ = ("_table", "_usual", "most")

    def __init__(self, most: int, table: SlotTable) -> None:
        """`most` 0: nothing is held back, and nobody need ask."""
        self.most = most
        self._table = table
        self._usual: float | None = None

    def ended(self, tokens: int) -> None:
        """An answer was so long: that tells more of the next one than `max_tokens`, which many leave open.
        What ended before its first token tells nothing."""
        if not tokens:
            return
        usual = float(tokens) if self._usual is None else self._usual
        self._usual = usual + (tokens - usual) / MEMORY

    def room(self, room: int, rows: NDArray64, rows_tokens: int, backlog: int) -> int:
        """Of `room` tokens how many the step's prompts may take, `rows` slots decoding in it with
        `rows_tokens` tokens, and `backlog` tokens of prompts waiting."""
        if not len(rows):
            return room
        beside = max(self.most - rows_tokens, LEAST)
        if beside >= min(room, backlog):
            return room
        return min(room, max(beside, math.ceil(backlog / self._steps(rows))))

    def _steps(self, rows: NDArray64) -> float:
        """That the rows are likely to take still, on average and at least one."""
        table = self._table
        most = table.max_tokens[rows].clip(max=CLIP if self._usual is None else math.ceil(self._usual))
        left = most - table.made[rows] - table.in_flight[rows]
        return max(float(left.clip(min=0).mean()), 1.0)
