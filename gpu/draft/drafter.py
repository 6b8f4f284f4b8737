"""What every drafter is, and what a step leaves for it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from core.plan import StepPlan
from gpu.kv.pool import KvPool
from gpu.models.base import CausalModel
from gpu.state.view import StepView
from gpu.step.buffers import Samples


class StepOutcome(NamedTuple):
    """What a step leaves on the device for its drafter, at fixed addresses.

    view     inputs of the forward, of the step's padded sizes
    samples  rows (step row of each sample), slots, positions (of the token chosen), drafts
    live     int32 [1]: true samples
    chosen   int64 [samples]: the token chosen at each sample
    aux      [tokens, layers * hidden] auxiliary hidden states of the target; None where none are wanted
    """

    view: StepView
    samples: Samples
    live: Tensor
    chosen: Tensor
    aux: Tensor | None


class Drafter(Protocol):
    """Proposes tokens behind every step. Owner: launch thread.

    What `follow` and `propose` launch is captured in graphs where there are any, so both read and write fixed
    addresses. Drafts are guesses: a wrong one costs time and changes no text.
    """

    aux: tuple[int, ...] | None
    """Layers of the target whose inputs a step keeps; none of them: the states behind its last norm; None:
    no hidden states are wanted."""
    keeps_kv: bool
    """Whether it has KV of its own: it takes in every step's tokens, and drafts where the plan has pages for
    them, both in launches of its own. One without proposes behind the sampling of every step, in the same
    launch, and finds out on the device whether the plan wants drafts: a launch of its own would cost a step
    of one row 10 us."""

    def use_model(self, target: CausalModel | None) -> None:
        """Draft for this target from now on; None: for none, and its weights may go."""
        ...

    def use_pool(self, pool: KvPool | None) -> None:
        """Use pages of the same numbers as the target's `pool`; None lets go of them."""
        ...

    def prepare(self, plan: StepPlan) -> None:
        """Launch what new slots need ahead of their step (uncaptured; mostly nothing)."""
        ...

    def follow(self, outcome: StepOutcome) -> None:
        """Behind acceptance: take in the step's tokens, of decode rows and of chunks. Steps of decode rows
        alone behind which nothing is proposed are left out."""
        ...

    def propose(self, outcome: StepOutcome, rows: int) -> None:
        """Behind `follow`, for each of the (at most `rows`) first samples that are rows' own (the first
        `outcome.samples.drafts.rows` of them): write `SlotTables.drafts[slot]` = [count, ids...]."""
        ...
