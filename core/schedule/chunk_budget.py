"""Chunk sizes: how many prompt tokens a step with decode rows takes."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import Final, NamedTuple

import numpy as np

from core.config import ScheduleConfig
from core.executor import Capabilities
from core.schedule.builder import PlanBuilder
from core.types import NDArray64

LEAST_CHUNK: Final = 64
"""Minimum prompt tokens of a step with chunks and decode rows: prompts progress even if decode rows alone
take longer than the target."""
LEAST_SECONDS: Final = 1e-6
"""Minimum seconds of a step."""
NEAR_BEST: Final = 0.97
"""The largest chunk size is chosen whose measured prompt tokens per second are at least this share of the
highest. Measured sizes differ by one or two percent, while each step has a fixed cost of about 2.8 ms that
the measurement misses: on the 8B with 32 prompts of 4,096 tokens, chunks of 1,024 tokens had 9.9% less
throughput than chunks of 8,192, and chunks of 1,792 had 7.0% less."""
SPACING: Final = 512
"""Tokens between the sizes that are considered beyond the measured ones."""
LEARNING: Final = 1 / 8
"""Weight of a step's seconds in the averages of what the costs leave out."""
HELD: Final = 0.05
"""Maximum of an account without a target, in seconds: it fills while prompts wait for memory. A prompt that
takes no longer than this is a short one."""
SMALL_SHARE: Final = 0.75
"""Share of prompts below which a step's prompt tokens take at most `HELD` seconds without a target: prompts
pause so much that larger steps would not end them earlier. Up to four callers of 12,000-token prompts beside
64 streams of an 8B have less. Predicted there: p99 inter-token latency 66 ms for 249, the same throughput and
first tokens; 0.3% less throughput in c256."""
MOST_EXCESS: Final = 4.0
"""Limit on seconds, as a multiple of the known seconds or the average: more is an accident."""
MIXED: Final = 64
"""Steps with rows and chunks after which one has no chunks, where no cost is measured, so that it is known
what rows alone take: chunks pay what their step takes longer. 0.05% of an 8B's time."""
SCALES: Final = (0.5, 2.0)
"""Bounds of the ratio of measured to predicted seconds of steps with chunks."""
SEVERAL: Final = 4
"""Minimum number of prompts in a step that is cut to a padded size. The last prompt gets its first token one
step later; with fewer prompts this costs more than the padding."""
BESIDE: Final = 64
"""Decode tokens from which a step is made shorter, since all their rows gain from that: it is cut to a padded
size (`SEVERAL`), or has at most half of the tokens that it could hold (`room`)."""
PROMPTS_PER_ROW: Final = 4
"""Prompts per decode row up to which steps of short prompts are limited (`behind`). With more prompts, and
few rows beside them, long steps have more throughput: without this limit the 30B loses 1% in short512
(predicted)."""
MOST_CUT: Final = 1 / 3
"""Largest share of a step's prompt tokens that is left for the next step."""


class _Spent(NamedTuple):
    """A step in flight: its decode tokens, its prompt tokens, its seconds as predicted (0: nothing was
    known), the share of its seconds that went to the account (0: none did), and whether a long prompt
    pauses, so that its own prompts are short."""

    rows: int
    tokens: int
    seconds: float
    share: float
    pauses: bool


class ChunkBudget:
    """Keeps streams fluent while prompts are computed. In steps with decode rows

    size   with `--itl-target` a step takes at most so long: that is the gap between two tokens of each row.
           Of the sizes that do, chunks have the largest whose prompt tokens per second are close to the
           best (`NEAR_BEST`)
    share  between steps with chunks come steps without, so that prompts take at most the share

               weight * prompts / (weight * prompts + rows)

           of the device's time. `prompts` wait or are under way; one of them is worth `weight` rows.

    Steps without rows take all that they can hold. The share is an account: each step pays in that share of
    its seconds, and chunks pay what a step takes longer than its rows alone; while it is overdrawn, prompts
    pause, but for short ones beside a long one, which have an account of their own. It holds at most one
    target, or `HELD`, and nothing while no prompt waits: the debt that the last one left is paid back then,
    as if one waited.

    A step's seconds are known from costs that the executor measured. What they leave out, decode rows' reads
    of KV above all, is averaged over steps without chunks; and steps with chunks are compared with what was
    predicted for them. Without a target no cost is measured: seconds of steps without chunks and of a prompt
    token are averaged, and steps are short where prompts have less than `SMALL_SHARE`, beside many rows, and
    where prompts are short or longer than a step.

    Owner: event loop.
    """

    def __init__(self, config: ScheduleConfig, capabilities: Capabilities) -> None:
        """Without measured costs, or a target, sizes are not limited."""
        costs, most = capabilities.chunk_costs, capabilities.max_step_tokens
        self._padded = capabilities.step_sizes if capabilities.causal else ()
        self._target = 1e-3 * config.itl_target
        self._sizes: NDArray64 | None = None
        """Sizes of steps whose costs are known, ascending; None without a target."""
        self._weight = config.prefill_weight
        self._flights: deque[_Spent] = deque()
        self._account, self._short_account = 0.0, HELD
        self._pauses = False
        """A long prompt pauses in the step that is planned; short ones that wait do not."""
        self._longest = 0
        """Tokens of the longest prompt in the last step that paid from the account."""
        self._excess = 0.0
        """Seconds of a step without chunks beyond its costs: all of them where no cost is measured."""
        self._scale = 1.0
        self._mixed = 0
        """Steps with rows and chunks since the last one without chunks."""
        self._prompt_seconds = self._prompt_tokens = 0.0
        """Sums over the last steps with chunks, without what their rows took; used where no cost is measured.
        They decay by `LEARNING` a step. A step of few tokens, which take longer each, counts little."""
        self._seconds, self._pair = np.zeros(most + 1), 0.0
        if costs is not None and self._target > 0:
            # A step that cost nothing would pay nothing into the account, and prompts would wait for ever.
            self._seconds, self._pair = np.maximum(costs.step.upto(most), LEAST_SECONDS), costs.pair
            known = np.array(costs.step.sizes)
            known = known[known <= most]
            beyond = np.arange(known[-1] + SPACING, most + SPACING, SPACING).clip(max=most)
            self._sizes = np.unique(np.concatenate([known, beyond]))

    def room(self, plan: PlanBuilder, start: int, length: int) -> int:
        """Prompt tokens that a step with decode rows and `plan.room` left may take, the first of them behind
        `start` tokens of their prompt. `length`: mean tokens of prompts that wait or are under way."""
        room, rows = plan.room, plan.decode_tokens
        if not rows:
            return room
        if self._account < 0:
            return 0
        if self._sizes is None:
            if self._rows_unknown():
                return 0
            share = self._share(plan)
            if 0 < share < SMALL_SHARE:
                room = min(room, self._held_tokens())
            most = len(self._seconds) - 1
            if share and (rows >= BESIDE or length > most):
                # This halves the rows' gaps, and steps of 4,096 tokens compute nearly as many tokens per
                # second as steps of 8,192. In c256 the 8B's p99 inter-token latency falls from 189 to 103 ms
                # and its median first token from 1.4 to 0.9 s, at 1.2% of the throughput (30B: 101 to 61 ms,
                # 0.7%). Beside few rows, prompts that fit in one step finish sooner in whole steps.
                room = min(room, most // 2 - rows)
            return max(room, min(plan.room, LEAST_CHUNK))
        chunks = self._sizes - rows
        alone = self._seconds[self._sizes] + self._excess
        seconds = self._scale * (alone + self._pair * chunks * (start + chunks / 2))
        # Without attention's: a prompt has as many pairs of queries and keys whatever its chunks.
        rates = np.where((chunks > 0) & (seconds <= self._target), chunks / alone, 0.0)
        best = np.flatnonzero(rates > NEAR_BEST * rates.max())  # empty if no size fits
        return min(room, max(int(chunks[best[-1]]) if len(best) else 0, LEAST_CHUNK))

    def behind(self, plan: PlanBuilder, prompt: int) -> int:
        """Return how many prompt tokens a step may still take after a prompt of `prompt` tokens whose end it
        computes.

        After a short prompt, a step with fewer than `BESIDE` rows takes at most `HELD` seconds of prompts, so
        that the first of several short prompts finish sooner and rows have shorter gaps. In turns48 the 8B's
        p99 inter-token latency is 60 ms for 186 and its median first token comes after 0.27 s for 0.45, at
        the same throughput. In c32 the first token comes after 0.26 s for 0.45, and the p99 is 54 ms for 12:
        more steps have both, while the longest takes 0.05 s for 0.19.
        """
        held, rows = self._held_tokens(), plan.decode_tokens
        beside = plan.prompts <= PROMPTS_PER_ROW * rows and rows < BESIDE
        if not beside or prompt > held or self._sizes is not None or not self._share(plan):
            return plan.room
        at = bisect_right(self._padded, rows + held)
        most = self._padded[at - 1] - rows if at else held
        return min(plan.room, max(most - plan.prompt_tokens, 0))

    def _rows_unknown(self) -> bool:
        """Whether the next step must have no chunks, because the time of decode rows alone is unknown or was
        measured more than `MIXED` steps ago."""
        most = MIXED if self._excess else 1
        return self._weight > 0 and self._prompt_seconds > 0 and self._mixed >= most

    def short_room(self, plan: PlanBuilder) -> int:
        """Prompt tokens that short prompts may take in a step in which `room` is 0: they do not wait until
        the debt of a long prompt is paid."""
        most = self._short_tokens() if plan.prompts > 0 else -1
        self._pauses = most >= 0
        return most if self._pauses and self._short_account >= 0 else 0

    def pauses(self, tokens: int) -> bool:
        """Whether a prompt of `tokens` gets nothing of a step with decode rows until a debt is paid."""
        return self._account < 0 and (self._short_account < 0 or tokens > self._short_tokens())

    def _short_tokens(self) -> int:
        """Tokens of a prompt for which another, a long one, does not pause; -1: none pauses."""
        most = self._held_tokens()
        return most if self._account < 0 and self._sizes is None and self._longest > most else -1

    def _held_tokens(self) -> int:
        """Prompt tokens that take `HELD` seconds; as many as there may be where that is not known."""
        if self._prompt_seconds < LEAST_SECONDS:  # it may have decayed to almost nothing
            return len(self._seconds)
        return int(HELD * self._prompt_tokens / self._prompt_seconds)

    def fill_size(self, plan: PlanBuilder, wanted: int) -> None:
        """Limit a step with several prompts to the next smaller size that steps are padded to.

        `wanted` is the number of prompt tokens that wait. A step without room for all of them is not limited.

        Under short prompts that come one by one a step of some 900 tokens is padded by 64 on average. Two
        simulated replicas with an H100's step times and 1,024 clients (short512, three times as long) make
        35,800 tokens/s for 35,100. On GPUs it was measured together with other changes only.
        """
        rows = plan.decode_tokens
        if plan.prompts < SEVERAL or rows < BESIDE or wanted > plan.room:
            return
        at = bisect_right(self._padded, rows + wanted)
        over = rows + wanted - self._padded[at - 1] if at else wanted
        if over <= MOST_CUT * wanted:
            plan.room = wanted - over

    def spend(self, plan: PlanBuilder) -> None:
        """A step was planned."""
        rows, tokens, prompts = plan.decode_tokens, plan.prompt_tokens, plan.prompts
        seconds = float(self._seconds[rows]) + self._excess
        share = self._share(plan)
        if tokens and self._sizes is not None:
            known = float(self._seconds[rows + tokens]) + self._excess
            seconds = self._scale * (known + self._pair * plan.pairs)
        elif tokens:
            seconds = self._predicted(rows, tokens)
        self._flights.append(spent := _Spent(rows, tokens, seconds, share, self._pauses))
        if tokens and not self._pauses:
            self._longest = plan.longest()
        self._pauses = False
        self._mixed = self._mixed + 1 if rows and tokens else 0
        if share:
            self._pay(spent, seconds)
        else:
            self._account, self._short_account = 0.0, HELD
        if not prompts:
            self._account = min(self._account, 0.0)

    def _predicted(self, rows: int, tokens: int) -> float:
        """Predicted seconds of a step with chunks where no cost is measured; 0 if they are unknown. With
        decode rows they are unknown until a step without chunks has been measured: before that only the
        payment would be entered, and all of it taken back later."""
        known = self._prompt_tokens if self._excess or not rows else 0.0
        return self._excess + tokens * self._prompt_seconds / known if known else 0.0

    def learn(self, seconds: float) -> None:
        """Record that the oldest step in flight took `seconds`; 0: the executor did not measure it."""
        spent = self._flights.popleft()
        if not seconds:
            return
        if self._sizes is None:
            self._learn_unmeasured(spent, seconds)
        elif spent.rows and spent.tokens:
            found = self._scale * seconds / spent.seconds
            self._scale += (min(max(found, SCALES[0]), SCALES[1]) - self._scale) * LEARNING
        elif spent.rows:
            known = float(self._seconds[spent.rows])
            beyond = min(max(seconds - known, 0.0), MOST_EXCESS * known)
            self._excess += (beyond - self._excess) * LEARNING

    def _learn_unmeasured(self, spent: _Spent, seconds: float) -> None:
        """`learn` without measured costs. For a step with chunks the accounts are corrected: a prediction
        from steps of a few tokens may be far off. For a step without chunks they are not: a full account has
        dropped its payment, and a correction would leave a debt that no prompt caused."""
        if spent.seconds:  # else nothing was known to predict them from
            seconds = min(seconds, MOST_EXCESS * spent.seconds)
        if spent.tokens:
            beyond = max(seconds - self._excess * (spent.rows > 0), 0.0)
            self._prompt_seconds += beyond - self._prompt_seconds * LEARNING
            self._prompt_tokens += spent.tokens - self._prompt_tokens * LEARNING
        else:
            self._excess += (seconds - self._excess) * (LEARNING if self._excess else 1.0)
        if spent.share and spent.tokens:
            if not spent.seconds:  # an accident is more, such as a kernel that had to be compiled
                seconds = min(seconds, MOST_EXCESS * (self._excess + HELD))
            self._pay(spent, seconds, instead_of=spent.seconds)

    def _share(self, plan: PlanBuilder) -> float:
        """Share of the device's time that prompts may take beside the plan's rows; 0: not limited. A row
        counts once, whatever drafts it has."""
        rows, prompts = len(plan.decode_slots), max(plan.prompts, 1)
        return self._weight * prompts / (self._weight * prompts + rows) if rows else 0.0

    def _pay(self, spent: _Spent, seconds: float, instead_of: float = 0.0) -> None:
        """Enter a step that takes `seconds` into the accounts. `instead_of` are the seconds that were entered
        for it before. While a long prompt pauses, half of the payment goes to the account of short prompts;
        what that account cannot hold goes to the other one."""
        paid = spent.share * (seconds - instead_of)
        took = self._extra(spent, seconds) - self._extra(spent, instead_of)
        own = paid / 2 if spent.pauses else 0.0
        short = self._short_account + own - took * spent.pauses
        self._short_account = min(short, HELD)
        account = self._account + paid - own + short - self._short_account - took * (not spent.pauses)
        self._account = min(account, self._target or HELD)

    def _extra(self, spent: _Spent, seconds: float) -> float:
        """Seconds that the chunks add to a step that takes `seconds`. 0 until a step without chunks has been
        measured: until then it is not known how much of `seconds` the decode rows take."""
        plain = float(self._seconds[spent.rows]) + self._excess
        return max(seconds - plain, 0.0) if plain and spent.tokens else 0.0
