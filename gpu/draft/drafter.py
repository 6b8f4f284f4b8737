"""What every drafter is, and what a step leaves for it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from core.plan import StepPlan
from gpu.state.view import StepView
from gpu.step.buffers import Samples


class StepOutcome(NamedTuple):
    """What a step leaves on the device for its drafter, at fixed addresses (all of it is captured in graphs).

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
    """Proposes tokens behind every step. Owner: launch thread."""

    def prepare(self, plan: StepPlan) -> None:
        """Launch what new slots need ahead of their step (uncaptured; mostly nothing)."""
        ...

    def propose(self, outcome: StepOutcome, rows: int) -> None:
        """Behind acceptance, inside a graph: for each of the (at most `rows`) first samples that are rows'
        own (the first `outcome.samples.drafts.rows` of them), write `SlotTables.drafts[slot]` =
        [count, ids...] (count <= K)."""
        ...
