"""Prompt lookup without a model, behind steps whose tokens a test makes up, and in a whole engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from core.config import SpeculativeConfig
from core.plan import NewSlot, StepPlan
from core.types import NO_TOKENS
from gpu.draft.drafter import StepOutcome
from gpu.draft.ngram import NgramDrafter
from gpu.sample.rows import DraftSamples
from gpu.state.history import LEAST, NO_TOKEN, RETRY, START, UNIT, WEIGHT
from gpu.state.tables import SlotTables
from gpu.state.view import StepView
from gpu.step.buffers import Samples
from tests.rigs.arrays import ints
from tests.rigs.drafting import Drafts
from tests.rigs.runner import CPU, GREEDY

LETTERS = 4
UNTOUCHED = -9
"""Stands in the drafts of slot 0, which no step may write."""


class Step:
    """A step as a drafter sees it: `plan` before it, and behind it `tables` and `outcome(device)`."""

    def __init__(
        self, plan: StepPlan, rows: list[tuple[int, int]], drafts: list[int], chosen: list[int]
    ) -> None:
        """`rows`: slot and first position of each row; `drafts` of each; `chosen` of rows, then drafts."""
        self.plan, self._rows, self._drafts, self._chosen = plan, rows, drafts, chosen

    def outcome(self, samples: int, device: torch.device = CPU, proposes: bool = True) -> StepOutcome:
        """The outcome in tensors of `samples`, whose padding is slot 0."""
        before = np.concatenate([[0], np.cumsum(self._drafts)])
        owners = [*range(len(self._rows)), *np.repeat(np.arange(len(self._rows)), self._drafts).tolist()]
        slots = [self._rows[row][0] for row in owners]
        within = [0 for _ in self._rows] + [1 + i for count in self._drafts for i in range(count)]
        positions = [self._rows[row][1] + at for row, at in zip(owners, within, strict=True)]

        def padded(values: Sequence[int], size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.tensor([*values, *[0] * (size - len(values))], dtype=dtype, device=device)

        counted = DraftSamples(
            padded([len(self._rows)], 1), padded(before.tolist(), samples + 1), padded([proposes], 1)
        )
        chosen = padded(self._chosen, samples, torch.int64)
        view = StepView(0, 0, 0, *[chosen] * 11)  # of no interest to a lookup
        mine = Samples(padded([], samples), padded(slots, samples), padded(positions, samples), counted)
        return StepOutcome(view, mine, padded([len(owners)], 1), chosen, None)


class Texts:
    """Random texts with many repeats, written a step at a time. Rows come and go; what a drafter should
    propose for them is found in their whole texts, which are lists.

    With `namespaces`, each row has one of so many, or none; where they are `apart` its text has tokens of
    that alone, those from `LETTERS` times the namespace on."""

    def __init__(
        self, seed: int, rows: int, most: int, width: int, namespaces: int = 0, apart: bool = True
    ) -> None:
        self.tables = SlotTables(rows, 1, CPU, most)
        self.tables.drafts[0] = UNTOUCHED
        self.texts: dict[int, list[int]] = {}
        """Tokens by slot, `NO_TOKEN` for embeddings."""
        self.taken = 0
        """Drafts that were accepted."""
        self._most, self._width = most, width
        self._random = np.random.default_rng(seed)
        self._expected: dict[int, int] = {}
        self._waited: dict[int, int] = {}
        self._step = 0
        self._namespaces, self._apart = namespaces, apart
        self.namespace: dict[int, int] = {}
        """Namespaces by slot."""

    def next(self) -> Step:
        """Make up a step. Tables and texts are then as they are behind it."""
        random, rows = self._random, self.tables.slots - 1
        for slot in [slot for slot in self.texts if random.random() < 0.004]:
            del self.texts[slot]
        decoding = [slot for slot in self.texts if random.random() < 0.8]
        free = [slot for slot in range(1, rows + 1) if slot not in self.texts]
        new = tuple(self._new(slot) for slot in free if random.random() < 0.5)
        # Prompts whose last chunk comes later, or is in this step.
        ending = [each.slot for each in new if random.random() < 0.8]
        for each in new:
            if each.slot not in ending:
                del self.texts[each.slot]
        self._step += 1
        plan = StepPlan(self._step, ints(decoding), (), new)
        return self._take(plan, decoding, ending)

    def _new(self, slot: int) -> NewSlot:
        random, tables = self._random, self.tables
        embedded = int(random.integers(0, 5)) if random.random() < 0.2 else 0
        namespace = int(random.integers(0, self._namespaces + 1)) if self._namespaces else 0
        self.namespace[slot] = namespace
        first = self._first(slot)
        prompt = first + random.integers(0, LETTERS, random.integers(1, 2 * self._width)).astype(np.int32)
        prompt = np.concatenate([np.zeros(embedded, np.int32), prompt])
        output = NO_TOKENS
        if random.random() < 0.3:
            output = ints(first + random.integers(0, LETTERS, random.integers(1, 9)))
        self.texts[slot] = [*[NO_TOKEN] * embedded, *prompt[embedded:].tolist(), *output.tolist()]
        self._expected[slot], self._waited[slot] = START, 0
        known = len(self.texts[slot])
        tables.length[slot] = int(random.integers(0, known))  # what was cached
        tables.limit[slot] = known + int(random.integers(0, 600))
        tables.max_drafts[slot] = 0 if random.random() < 0.1 else int(random.integers(1, 2 * self._most))
        tables.drafts[slot] = torch.tensor([self._most, *[3] * self._most])  # of the slot's former owner
        return NewSlot(slot, GREEDY, prompt, output, 0, embedded=embedded, namespace=namespace)

    def _take(self, plan: StepPlan, decoding: list[int], ending: list[int]) -> Step:
        tables, random = self.tables, self._random
        rows = [(slot, len(self.texts[slot])) for slot in [*decoding, *ending]]
        given: list[int] = []
        sampled: list[list[int]] = []
        for at, (slot, first) in enumerate(rows):
            ready = tables.drafts[slot].tolist()
            room = min(ready[0], int(tables.max_drafts[slot]), int(tables.limit[slot]) - first)
            count = max(min(room, int(random.integers(0, self._most + 2))), 0) if at < len(decoding) else 0
            drafts = ready[1 : 1 + count]
            given.append(count)
            sampled.append(self._sampled(slot, drafts))
            accepted = 0
            if first <= int(tables.limit[slot]):
                while accepted < count and drafts[accepted] == sampled[-1][accepted]:
                    accepted += 1
                self.texts[slot] += [max(token, 0) for token in sampled[-1][: 1 + accepted]]
                tables.length[slot] = len(self.texts[slot]) - 1
                self.taken += accepted
                self._count(slot, accepted, count)
        chosen = [each[0] for each in sampled] + [token for each in sampled for token in each[1:]]
        self.rows = rows
        return Step(plan, rows, given, chosen)

    def _sampled(self, slot: int, drafts: list[int]) -> list[int]:
        """Tokens sampled behind each token: some rows quote themselves, others rarely do."""
        text, period = list(self.texts[slot]), 3 + slot
        found = []
        for draft in [*drafts, 0]:
            quotes = self._random.random() < (0.97 if slot % 2 else 0.1)
            token = text[-min(period, len(text))] if quotes else int(self._random.integers(0, LETTERS))
            token += 0 if quotes else self._first(slot)
            token = -1 if self._random.random() < 0.005 or token == NO_TOKEN else token
            found.append(token)
            text.append(draft)
        return found

    def _count(self, slot: int, accepted: int, given: int) -> None:
        self._waited[slot] += 1
        if given:
            worth = accepted if accepted < given else min(2 * given, self._most)
            before = self._expected[slot]
            self._expected[slot] = before - before // WEIGHT + worth * UNIT // WEIGHT
            self._waited[slot] = 0

    def _first(self, slot: int) -> int:
        """The lowest token of its texts."""
        return self.namespace[slot] * LETTERS if self._apart else 0

    def drafts(self, slot: int, first: int, longest: int, shortest: int) -> list[int]:
        """Drafts that a row should have whose sample was of position `first`."""
        text, tables = self.texts[slot], self.tables
        room = min(int(tables.limit[slot]) - len(text), int(tables.max_drafts[slot]), self._most)
        wanted = int(self._waited[slot] >= RETRY) if self.quiet(slot) else -(-self._expected[slot] // UNIT)
        count = min(room, wanted)
        if len(text) == first or count <= 0:
            return []
        found = continuation(text[-self._width :], longest, shortest)
        return [found[at % len(found)] for at in range(count)] if found else []

    def quiet(self, slot: int) -> bool:
        """Whether too few of its drafts were accepted."""
        return self._expected[slot] < LEAST


def continuation(text: list[int], longest: int, shortest: int) -> list[int]:
    """Tokens behind the last earlier occurrence of the longest suffix that has one."""
    for length in range(longest, shortest - 1, -1):
        suffix = text[-length:]
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == suffix and NO_TOKEN not in suffix:
                return text[end:]
    return []


def lookup(longest: int = 8, shortest: int = 2, capacity: int = 0) -> SpeculativeConfig:
    """Settings of prompt lookup."""
    return SpeculativeConfig(
        algorithm="ngram", prompt_lookup_max=longest, prompt_lookup_min=shortest, ngram_capacity=capacity
    )


def by_lookup(context: int, capacity: int = 0) -> Drafts:
    """Drafts of an engine that come from prompt lookup in the last `context` tokens, and in answers."""
    settings = lookup(capacity=capacity)
    return Drafts(4, 0.0, lambda rig, tables: NgramDrafter(tables, context, tables.most_drafts, settings))
