"""Steps that a draft model does not take in: it drafts for the text without their tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from core.plan import NewSlot, StepPlan
from gpu.draft.drafter import Drafter, StepOutcome
from gpu.state.tables import SlotTables
from tests.rigs import drafters, tiny_model
from tests.rigs.draft_jobs import Engines, engines_of, jobs, same
from tests.rigs.drafting import Drafts
from tests.rigs.runner import Rig
from tests.rigs.tiny_model import Tiny

KINDS = ("greedy", "logprobs", "repetition", "seeded", "stop ids")
DEPTH = 3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return tiny_model.build("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def engines(tiny: Tiny) -> Iterator[Engines]:
    with engines_of(tiny.path) as made:
        yield made


class Made(NamedTuple):
    """Drafts behind a step: of the text of `prompt` the positions `taken` were taken in."""

    prompt: bytes
    taken: list[int]
    last: int
    drafts: list[int]


class Watched:
    """A drafter, and what it took in and proposed."""

    def __init__(self, inner: Drafter, tables: SlotTables, made: list[Made]) -> None:
        self._inner, self._tables, self._made = inner, tables, made
        self.aux, self.keeps_kv = inner.aux, inner.keeps_kv
        self.use_model, self.use_pool = inner.use_model, inner.use_pool
        self._new: dict[int, NewSlot] = {}
        self._taken: dict[int, list[int]] = {}

    def prepare(self, plan: StepPlan) -> None:
        self._inner.prepare(plan)
        self._new |= {new.slot: new for new in plan.new_slots}
        self._taken |= {new.slot: list(range(new.cached)) for new in plan.new_slots}
        for chunk in plan.chunks:
            self._taken[chunk.slot] += range(chunk.start, chunk.start + len(chunk.tokens))

    def follow(self, outcome: StepOutcome) -> None:
        self._inner.follow(outcome)
        for slot, first in self._rows(outcome):
            if first > len(self._new[slot].prompt):
                self._taken[slot] += range(first - 1, int(self._tables.length[slot]))

    def propose(self, outcome: StepOutcome, rows: int) -> None:
        self._inner.propose(outcome, rows)
        for slot, _ in self._rows(outcome):
            count, *drafts = self._tables.drafts[slot].tolist()
            prompt, last = self._new[slot].prompt.tobytes(), int(self._tables.length[slot])
            self._made.append(Made(prompt, list(self._taken[slot]), last, drafts[:count]))

    def _rows(self, outcome: StepOutcome) -> list[tuple[int, int]]:
        """Slots, and positions of the first token chosen."""
        own = int(outcome.samples.drafts.rows)
        columns = (outcome.samples.slots, outcome.samples.positions)
        return list(zip(*(column[:own].tolist() for column in columns), strict=True)) if self._new else []


@pytest.mark.parametrize("overlap", [0, 2])
async def test_behind_a_gap_a_draft_model_goes_on_with_the_text_it_knows(
    engines: Engines, tiny: Tiny, overlap: int
) -> None:
    kinds = [job for job in jobs() if job.id in KINDS]
    plain = await engines.plain(kinds)
    made = list[Made]()

    def make(rig: Rig, tables: SlotTables) -> Drafter:
        return Watched(drafters.small(tiny.path)(rig, tables), tables, made)

    engine = engines.make(Drafts(DEPTH, 0.0, make), overlap)
    runner: Any = engine.runner._runner
    launch, steps = runner.launch, iter(range(10**6))

    def launched(plan: StepPlan) -> Any:
        return launch(msgspec.structs.replace(plan, proposes=next(steps) % 7 > 3))

    runner.launch = launched
    texts = {}
    for answer in await engine.answers(kinds):
        same(answer, plain[answer.run.id])
        key = answer.run.prompt.tobytes()
        texts[key] = np.append(answer.run.prompt, answer.tokens).tolist()
    greedy = plain["greedy"].run.prompt.tobytes()
    gaps = 0
    for each in made:
        if each.prompt != greedy or each.last >= len(texts[greedy]):
            continue
        known = [texts[greedy][at] for at in [*each.taken, each.last]]
        gaps += len(known) < each.last + 1
        for draft in each.drafts:
            assert draft == int(tiny.reference(torch.tensor([known])).logits[0, -1].argmax())
            known.append(draft)
    assert gaps > 2, "nothing was left out"
