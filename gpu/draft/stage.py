"""Runs a drafter after each step: launches its work for a plan, and lists what is captured before serving.

sampling ─► accept ─► Follow: the step's tokens ─► Propose: drafts of its rows, in `SlotTables.drafts`

A drafter without KV proposes at the end of the sampling's launch instead (`DraftStage.accepted`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec

from core.costs import StepCosts
from core.plan import StepPlan
from gpu.draft.drafter import Drafter, StepOutcome
from gpu.state.tables import SlotTables
from gpu.step.costs import Launch, is_late, measure_costs
from gpu.step.graphs import Launchable
from gpu.step.shapes import decode_sizes, fit
from gpu.step.steps import Forward

# Structs, not tuples: as keys of one table, equal fields must not make two kinds equal.


class Follow(msgspec.Struct, frozen=True):
    """Takes in the tokens of a forward."""

    forward: Forward


class Propose(msgspec.Struct, frozen=True):
    """Drafts for up to `rows` rows."""

    rows: int


Key = Follow | Propose


class DraftStage:
    """Owner: launch thread."""

    def __init__(
        self,
        drafter: Drafter,
        tables: SlotTables,
        outcome: Callable[[Forward | None], StepOutcome],
        padded: bool,
        paths: Callable[[int], None],
    ) -> None:
        """`outcome` gives what a step of that size leaves, for None the whole
        of its buffers. `padded`: work is captured, in few sizes. `paths` makes chains of the paths that the
        first samples accepted, where drafts are trees (`gpu.step.paths`)."""
        self.drafter, self._paths = drafter, paths
        self._tables, self._outcome = tables, outcome
        self._sizes = decode_sizes(tables.slots - 1) if padded else None
        self._measured = False

    def launch(self, plan: StepPlan, forward: Forward, launches: Launchable[Key]) -> None:
        """Launch the drafting behind the sampling of `plan`, whose launches had the sizes of `forward`."""
        if not self.drafter.keeps_kv:
            return
        if plan.proposes or plan.chunks:
            launches[Follow(_plain(forward))]()
        rows = plan.num_samples - plan.drafts
        if rows and plan.proposes:
            launches[Propose(rows if self._sizes is None else fit(self._sizes, rows))]()

    def accepted(self, samples: int) -> None:
        """Runs after `samples` samples are accepted, in the launch of the sampling."""
        self._paths(samples)
        if not self.drafter.keeps_kv:
            self.drafter.propose(self._outcome(None), min(samples, self._tables.slots - 1))

    def keys(self, forwards: Iterable[Forward]) -> Iterator[Key]:
        """All that is captured, largest first."""
        if self.drafter.keeps_kv:
            yield from map(Follow, dict.fromkeys(map(_plain, forwards)))
            yield from map(Propose, reversed(self._sizes or ()))

    def measure(
        self, launch: Launch, vocab: int, late: Callable[[float], bool] = is_late
    ) -> StepCosts | None:
        """What steps cost, by the `launch` of a runner; once, before requests have slots. `late` as
        `measure_costs` has it."""
        if self._measured:
            return None
        self._measured = True
        samples = len(self._outcome(None).samples.slots)
        sizes = range(1, samples + 1) if self._sizes is None else decode_sizes(samples)
        return measure_costs(launch, self._tables, sizes, vocab, late)

    def run(self, key: Key) -> None:
        """The work of `key`."""
        if isinstance(key, Follow):
            self.drafter.follow(self._outcome(key.forward))
        else:
            self.drafter.propose(self._outcome(None), key.rows)


def _plain(forward: Forward) -> Forward:
    """Return the forward without adapters: drafts are made with the base model's weights, and the target
    verifies them with the adapters of their rows."""
    return msgspec.structs.replace(forward, adapters=False) if forward.adapters else forward
