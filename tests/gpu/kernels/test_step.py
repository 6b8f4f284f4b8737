"""A plan's way to the device, by both sets of kernels: tables and view are what it says, padding is neutral,
tokens come back in order, and masks forbid what they should."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from core.plan import Chunk, NewSlot, PageWrites, StepPlan
from core.request import SamplingParams
from core.types import Ints
from gpu.kernels.sampling import kernels as triton_kernels
from gpu.kernels.sampling.adjust import mask_rows
from gpu.kernels.step import begin_step
from gpu.sample import torch_kernels
from gpu.sample.kernels import MaskRows, SamplingKernels
from gpu.sample.penalties import Counts
from gpu.state.entry import EntryRing, Limits
from gpu.state.tables import COLUMNS, LEVEL_BITS, LEVELS, ONE, SlotTables
from gpu.step import begin
from gpu.step.begin import BeginStep
from gpu.step.buffers import HiddenShape, StepBuffers
from gpu.step.rings import Entries, Rings
from gpu.step.steps import ExactSizes, Forward

ROWS, PAGES, PAGE, TOKENS = 6, 8, 4, 64
LIMITS = Limits(rows=ROWS, chunks=ROWS, tokens=TOKENS, writes=5, table_width=PAGES, samples=ROWS)


def ints(values: object) -> Ints:
    return np.array(values, np.int32)


class Plans:
    """Random plans that a scheduler could make: fresh slots with chunks, growing rows, new pages."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._lengths: dict[int, int] = {}
        self._step = 0

    def next(self) -> StepPlan:
        rng = self._rng
        full = [slot for slot, length in self._lengths.items() if length + 1 >= PAGE * PAGES]
        for slot in full:
            del self._lengths[slot]
        decode = [slot for slot in self._lengths if rng.random() < 0.7]
        fresh = [slot for slot in range(1, ROWS + 1) if slot not in self._lengths and rng.random() < 0.5]
        new, chunks, cells = [], [], []
        for slot in fresh:
            cached = int(rng.integers(0, 2)) * PAGE
            chunks.append(
                Chunk(slot, cached, ints(rng.integers(0, 99, rng.integers(1, 9))), rng.random() < 0.6)
            )
            params = SamplingParams(
                temperature=float(rng.random()), top_k=int(rng.integers(0, 9)), top_p=0.5, min_p=0.25,
                seed=int(rng.integers(0, 2**62)),
            )  # fmt: skip
            new.append(NewSlot(slot, params, ints([]), ints([]), cached))
            self._lengths[slot] = cached
        for slot, count in [(s, 1) for s in decode] + [(c.slot, len(c.tokens)) for c in chunks]:
            end = self._lengths[slot] + count
            cells += [(slot, at, int(rng.integers(1, 50))) for at in range(-(-end // PAGE))]
            self._lengths[slot] = end
        self._step += 1
        writes = PageWrites(*ints(cells).reshape(-1, 3).T)
        return StepPlan(self._step, ints(decode), tuple(chunks), tuple(new), writes)


class Expected:
    """Tables as lists, and what a step of a plan must see."""

    def __init__(self) -> None:
        self.lengths, self.cells = [0] * (ROWS + 1), [0] * (ROWS + 1)
        self.pages = [[0] * PAGES for _ in range(ROWS + 1)]

    def take(self, plan: StepPlan) -> None:
        for new in plan.new_slots:
            self.lengths[new.slot], self.cells[new.slot] = new.cached, 0
        writes = plan.page_writes
        for slot, index, page in zip(writes.slots, writes.indices, writes.pages, strict=True):
            self.pages[slot][index] = int(page)
        self.ids, owners, self.samples = [], [], []
        self.decode = [(slot, self.lengths[slot] + 1) for slot in plan.decode_slots.tolist()]
        for row, (slot, length) in enumerate(self.decode):
            self.ids.append(self.cells[slot])
            owners.append((slot, length - 1))
            self.samples.append((row, slot, length))
        self.chunks = []
        for chunk in plan.chunks:
            self.chunks.append((chunk.slot, chunk.start, len(owners)))
            self.ids += chunk.tokens.tolist()
            owners += [(chunk.slot, chunk.start + i) for i in range(len(chunk.tokens))]
            if chunk.samples:
                self.samples.append((len(owners) - 1, chunk.slot, chunk.start + len(chunk.tokens)))
        self.positions = [position for _, position in owners]
        self.mapping = [self.pages[slot][at // PAGE] * PAGE + at % PAGE for slot, at in owners]


class Ends(NamedTuple):
    """The first and the last kernel of a step."""

    begin_step: BeginStep
    last: SamplingKernels


KERNELS = {
    "triton": Ends(begin_step, triton_kernels),
    "torch": Ends(begin.begin_step, torch_kernels),
}


def on(kernels: str, device: torch.device) -> Ends:
    if kernels == "torch" and device.type != "cpu":
        pytest.skip("a CPU's")
    return KERNELS[kernels]


def accept(
    run: Ends, tokens: torch.Tensor, buffers: StepBuffers, rings: Rings, counts: Counts | None = None
) -> None:
    """Hand `tokens` to the last kernel of the step that `buffers` hold."""
    run.last.accept(tokens, buffers.rows, rings.cursor, rings.answers, counts)
    if tokens.is_cuda:
        torch.cuda.synchronize()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kernels", KERNELS)
def test_entries_become_tables_and_views(kernels: str, exact: bool, seed: int, device: torch.device) -> None:
    run = on(kernels, device)
    tables, expected, rings = (
        SlotTables(ROWS, PAGES, device),
        Expected(),
        Rings(Entries(LIMITS, 3, device), device),
    )
    buffers = StepBuffers(tables, LIMITS, HiddenShape(8, torch.float32))
    plans = Plans(seed)
    surpluses = 0
    for _ in range(12):
        plan = plans.next()
        expected.take(plan)
        n, d, c, s = plan.num_tokens, len(plan.decode_slots), len(plan.chunks), plan.num_samples
        padded = Forward(TOKENS if c else ROWS, ROWS, ROWS if c else 0, ROWS)
        key = ExactSizes().forward(plan) if exact else padded
        view, samples = buffers.view(key), buffers.samples.first(key.samples)
        ticket = rings.write(plan)
        if ticket.surplus is not None:
            tables.page_table.view(-1).index_copy_(
                0, *(torch.from_numpy(each).to(device) for each in ticket.surplus[:2])
            )
        run.begin_step(rings.entries, tables, view, samples, page_size=PAGE)
        surpluses += len(plan.page_writes.slots) > LIMITS.writes
        assert view.counts.tolist() == [n, d, c, s]
        assert view.common.tolist() == [0]
        assert view.ids[:n].tolist() == expected.ids
        assert view.positions[:n].tolist() == expected.positions
        assert view.kv_slot_mapping[:n].tolist() == expected.mapping
        for made, wanted in [
            ((view.decode_slots[:d], view.decode_lengths[:d]), expected.decode),
            ((samples.rows[:s], samples.slots[:s], samples.positions[:s]), expected.samples),
            ((view.chunk_slots[:c], view.chunk_starts[:c], view.chunk_firsts[:c]), expected.chunks),
        ]:
            assert list(zip(*(each.tolist() for each in made), strict=True)) == wanted
        for padding in (view.ids[n:], view.positions[n:], view.kv_slot_mapping[n:], view.decode_slots[d:]):
            assert not padding.any()
        assert (view.decode_lengths[d:] == 1).all()
        if c:
            assert (view.chunk_firsts[c:] == n).all()
        # Sampled tokens come back through the ring, and stand in their cells in the next step.
        tokens = torch.arange(s, device=device) + 100 * plan.step
        accept(run, tokens, buffers, rings)
        answer = rings.read(ticket)
        assert answer.tokens.tolist() == tokens.tolist() and answer.counts is answer.drafted is None
        for (_, slot, position), token in zip(expected.samples, tokens.tolist(), strict=True):
            expected.cells[slot], expected.lengths[slot] = token, position
        assert tables.length.tolist() == expected.lengths
        assert tables.last_token.tolist() == expected.cells
    for slot, new in {new.slot: new for new in plan.new_slots}.items():
        held = [float(table[slot]) for table in (tables.temperature, tables.top_p, tables.min_p)]
        assert held == pytest.approx([new.params.temperature, new.params.top_p, new.params.min_p])
        assert (tables.top_k[slot], tables.seed[slot]) == (new.params.top_k, new.params.seed)
    for column in COLUMNS:
        assert float(tables.columns[column.row][0]) == column.neutral, column.name
    assert tables.page_table.tolist() == expected.pages
    assert surpluses, "no plan was larger than its entry"


DRAFTS = 3
DRAFTING = LIMITS._replace(samples=16, drafts=DRAFTS, writes=64)
HOSTS_OWN = 5
"""A slot whose drafts are never verified."""
PENALISED = 4
"""The last slot with token counts."""


def divided(survival: np.ndarray, wanted: list[int], budget: int) -> list[int]:
    """Drafts of each row, `wanted` at most: one at a time to the row whose next one is the likeliest, by
    level, then the earliest of its row, then of the first row."""
    edges = (ONE - (np.arange(1, LEVELS) << LEVEL_BITS)).astype(np.int32).view(np.float32)
    levels = [[sum(each <= edges) for each in row] for row in survival]
    given = [0] * len(wanted)
    for _ in range(min(budget, sum(wanted))):
        able = [row for row, most in enumerate(wanted) if given[row] < most]
        given[min(able, key=lambda row: (max(levels[row][: given[row] + 1]), given[row], row))] += 1
    return given


class Row(NamedTuple):
    """A decode row: its query's tokens, its first position, and whether it is at its limit."""

    slot: int
    tokens: list[int]
    start: int
    full: bool


class Drafting:
    """Random steps of rows with drafts and limits, and what their tables must hold."""

    def __init__(self, seed: int, tables: SlotTables) -> None:
        self.rng = np.random.default_rng(seed)
        self.tables = tables
        self.length = {slot: int(self.rng.integers(1, 12)) for slot in range(1, ROWS + 1)}
        self.limit = {slot: int(self.rng.integers(12, 20)) for slot in self.length}  # behind every chunk
        self.cell = dict.fromkeys(self.length, 0)
        self.counts = np.zeros((PENALISED, 3), int)
        self.pages = self.rng.integers(1, 50, (ROWS + 1, PAGES))
        self.step = 0

    def first(self) -> StepPlan:
        """The slots, and their pages."""
        new = tuple(
            NewSlot(
                slot,
                SamplingParams(presence_penalty=float(slot <= PENALISED)),
                ints([]), ints([]), length, limit=self.limit[slot], drafts=slot != HOSTS_OWN,
            )
            for slot, length in self.length.items()
        )  # fmt: skip
        cells = [(slot, at, self.pages[slot, at]) for slot in self.length for at in range(PAGES)]
        return StepPlan(0, ints([]), new_slots=new, page_writes=PageWrites(*ints(cells).T))

    def next(self) -> tuple[StepPlan, list[Row]]:
        """A random plan and the expected queries of its decode rows; writes their drafts to the tables."""
        rng, self.step = self.rng, self.step + 1
        slots = [slot for slot in self.length if rng.random() < 0.6][:4]
        longest = int(rng.integers(1, DRAFTS + 2))
        drafts = int(rng.integers(0, 5)) if longest > 1 else 0
        known, wanted, survival = [], [], []
        for slot in slots:
            known.append(rng.integers(0, 3, DRAFTS).tolist())
            ready = int(rng.integers(0, DRAFTS + 1))
            self.tables.drafts[slot] = torch.tensor([ready, *known[-1]], dtype=torch.int32)
            survival.append(rng.choice([1.0, 0.99, 0.9, 0.5, 0.2, 0.001], DRAFTS).astype(np.float32))
            self.tables.survival[slot] = torch.from_numpy(survival[-1])
            room = self.limit[slot] - self.length[slot]
            wanted.append(max(min(ready, room - 1, longest - 1), 0) if slot != HOSTS_OWN else 0)
        rows = []
        given = divided(np.array(survival), wanted, drafts)
        for slot, tokens, count in zip(slots, known, given, strict=True):
            start = self.length[slot]
            full = start >= self.limit[slot]
            rows.append(Row(slot, [self.cell[slot], *tokens[:count]], start, full))
        rest = [slot for slot in self.length if slot not in slots]
        chunks = tuple(
            Chunk(slot, 4 * (slot % 3), ints(rng.integers(0, 99, rng.integers(1, 5))), rng.random() < 0.6)
            for slot in rest
            if rng.random() < 0.5
        )
        proposes = self.step % 3 > 0
        return StepPlan(
            self.step, ints(slots), chunks, query_length=longest, drafts=drafts, proposes=proposes
        ), rows

    def mapping(self, slot: int, at: int) -> int:
        return int(self.pages[slot, at // PAGE]) * PAGE + at % PAGE

    def accept(self, rows: list[Row], chunks: list[Chunk], chosen: list[int]) -> tuple[list[int], list[int]]:
        """The tokens taken of those chosen, and how many are each row's."""
        tokens, counts = [], []
        ends = [Row(chunk.slot, [0], chunk.start + len(chunk.tokens) - 1, False) for chunk in chunks]
        firsts, chosen = chosen[: len(rows) + len(ends)], chosen[len(rows) + len(ends) :]
        for first, row in zip(firsts, [*rows, *ends], strict=True):
            more = len(row.tokens) - 1
            mine, chosen = [first, *chosen[:more]], chosen[more:]
            count = 1
            while count < len(mine) and mine[count - 1] == row.tokens[count]:
                count += 1
            if row.full:
                count = 0
            else:
                self.length[row.slot], self.cell[row.slot] = row.start + count, max(mine[count - 1], 0)
            tokens += mine[:count]
            counts.append(count)
            for token in mine[:count]:
                if row.slot <= PENALISED and token >= 0:
                    self.counts[row.slot - 1, token] += 1
        return tokens, counts


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kernels", KERNELS)
def test_rows_of_several_tokens(kernels: str, exact: bool, seed: int, device: torch.device) -> None:
    """Queries as long as drafts, budget and limit allow; tokens as far as the drafts were right."""
    run = on(kernels, device)
    tables = SlotTables(ROWS, PAGES, device, DRAFTS)
    buffers = StepBuffers(tables, DRAFTING, HiddenShape(8, torch.float32))
    rings, drafting = Rings(Entries(DRAFTING, 3, device), device), Drafting(seed, tables)
    counts = Counts(PENALISED, 3, device)
    rings.read(rings.write(drafting.first()))
    view, samples = buffers.view(Forward(16, 16, 0, 16)), buffers.samples
    run.begin_step(rings.entries, tables, view, samples, page_size=PAGE)
    seen = set()
    for _ in range(25):
        plan, rows = drafting.next()
        verifies = plan.chunks or plan.drafts
        padded = Forward(
            TOKENS if plan.chunks else 16, 16, ROWS if plan.chunks else 0, 16, query=4 if verifies else 1
        )
        key = ExactSizes().forward(plan) if exact else padded
        view, samples = buffers.view(key), buffers.samples.first(key.samples)
        ticket = rings.write(plan)
        run.begin_step(rings.entries, tables, view, samples, page_size=PAGE)
        at = [(row, row.start + j - row.full) for row in rows for j in range(len(row.tokens))]
        queries, sampling = len(at), [chunk for chunk in plan.chunks if chunk.samples]
        n, s = queries + sum(len(chunk.tokens) for chunk in plan.chunks), queries + len(sampling)
        assert view.counts.tolist() == [n, queries, len(plan.chunks), s]
        assert samples.drafts.proposes.tolist() == [plan.proposes]
        assert view.ids[:queries].tolist() == [token for row in rows for token in row.tokens]
        assert view.positions[:queries].tolist() == [position for _, position in at]
        assert view.decode_slots[:queries].tolist() == [row.slot for row, _ in at]
        assert view.decode_lengths[:queries].tolist() == [position + 1 for _, position in at]
        stored = [0 if row.full else drafting.mapping(row.slot, position) for row, position in at]
        ends = []
        for chunk, first in zip(plan.chunks, view.chunk_firsts.tolist(), strict=False):
            assert first == len(stored)
            assert view.ids[first : first + len(chunk.tokens)].tolist() == chunk.tokens.tolist()
            stored += [drafting.mapping(chunk.slot, chunk.start + j) for j in range(len(chunk.tokens))]
            ends += [len(stored) - 1] * chunk.samples
        assert view.kv_slot_mapping[:n].tolist() == stored
        for padding in (view.ids[n:], view.positions[n:], view.kv_slot_mapping[n:]):
            assert not padding.any()
        assert (view.decode_lengths[queries:] == 1).all() and not view.decode_slots[queries:].any()
        # Of each row its last token, of each chunk its end, then the drafts.
        of_rows = [(at, row.slot, pos + 1 + row.full) for at, (row, pos) in enumerate(at)]
        drafted = [pos > row.start for row, pos in at]
        wanted = [each for each, draft in zip(of_rows, drafted, strict=True) if not draft]
        wanted += [(end, c.slot, c.start + len(c.tokens)) for end, c in zip(ends, sampling, strict=True)]
        wanted += [each for each, draft in zip(of_rows, drafted, strict=True) if draft]
        assert list(zip(*(each[:s].tolist() for each in samples[:3]), strict=True)) == wanted
        assert not samples.rows[s:].any() and not samples.slots[s:].any()
        chosen = drafting.rng.integers(-1, 3, s).tolist()
        accept(run, torch.tensor(chosen, device=device), buffers, rings, counts)
        answer = rings.read(ticket)
        expected = drafting.accept(rows, sampling, chosen)
        counted = [1] * len(answer.tokens) if answer.counts is None else answer.counts.tolist()
        assert (answer.tokens.tolist(), counted) == expected
        verified = [len(row.tokens) - 1 for row in rows] + [0] * len(sampling)
        assert (None if answer.drafted is None else answer.drafted.tolist()) == (
            verified if plan.drafts else None
        )
        assert counts.tables[0].tolist() == drafting.counts.tolist()
        assert torch.equal(counts.tables[1], counts.tables[0] > 0)
        for slot in drafting.length:
            held = int(tables.length[slot]), int(tables.last_token[slot])
            assert held == (drafting.length[slot], drafting.cell[slot])
        seen |= {*expected[1]}
    assert seen >= {0, 1, 2}, "no row was at its limit, or no draft was taken"


MANY = 1100
"""Rows that one pass of the kernel does not hold."""


@pytest.mark.parametrize(
    ("told", "budget"),
    [
        *(("nothing", budget) for budget in (1, 2047)),
        *(("levels", budget) for budget in (0, 1100, 3300)),
        *(("anything", budget) for budget in (1, 1100, 2047)),
    ],
)
@pytest.mark.parametrize("kernels", KERNELS)
def test_drafts_go_to_the_rows_that_will_most_likely_take_them(
    kernels: str, told: str, budget: int, device: torch.device
) -> None:
    run, rng = on(kernels, device), np.random.default_rng(budget)
    limits = Limits(MANY, 1, 4 * MANY, 8, 8, samples=4 * MANY, drafts=DRAFTS)
    tables = SlotTables(MANY, 8, device, DRAFTS)
    survival: np.ndarray = np.ones((MANY + 1, DRAFTS), np.float32)
    if told == "levels":
        survival = rng.choice([0.99, 0.7, 0.3], survival.shape).cumprod(1).astype(np.float32)
    elif told == "anything":  # also rising, above 1, below 0
        survival = rng.normal(0.5, 0.6, survival.shape).astype(np.float32)
        survival[::7, 1] = np.nan
    tables.survival.copy_(torch.from_numpy(survival))
    ready = rng.integers(0, DRAFTS + 1, MANY + 1)
    tables.drafts[:, 0] = torch.from_numpy(ready)
    tables.max_drafts.fill_(DRAFTS)
    tables.limit.fill_(30)
    rings = Rings(Entries(limits, 2, device), device)
    buffers = StepBuffers(tables, limits, HiddenShape(8, torch.float32))
    slots = rng.permutation(MANY) + 1
    rings.write(StepPlan(0, ints(slots), query_length=1 + DRAFTS, drafts=budget))
    view = buffers.view(Forward(4 * MANY, 4 * MANY, 0, 4 * MANY, query=1 + DRAFTS))
    run.begin_step(rings.entries, tables, view, buffers.samples, page_size=PAGE)
    given = np.diff(buffers.samples.drafts.before[: MANY + 1].cpu().numpy())
    assert given.tolist() == divided(survival[slots], ready[slots].tolist(), budget)
    assert given.sum() == min(budget, ready[1:].sum())


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_new_slots_words_reach_their_columns(kernels: str, device: torch.device) -> None:
    """A new slot's columns, among those of others, each have a value of their own."""
    run = on(kernels, device)
    tables, rings = SlotTables(ROWS, PAGES, device), Rings(Entries(LIMITS, 2, device), device)
    buffers = StepBuffers(tables, LIMITS, HiddenShape(8, torch.float32))
    params = SamplingParams(
        temperature=0.9, top_k=5, top_p=0.5, min_p=0.25, seed=2**61 + 7, repetition_penalty=1.5,
        frequency_penalty=0.75, presence_penalty=-0.5,
    )  # fmt: skip
    news = tuple(NewSlot(slot, params, ints([]), ints([]), 3 * slot) for slot in (4, 2))
    rings.write(StepPlan(1, ints([]), new_slots=news))
    view = buffers.view(Forward(ROWS, ROWS, 0, ROWS))
    run.begin_step(rings.entries, tables, view, buffers.samples, page_size=PAGE)
    for column in COLUMNS:
        values = tables.columns[column.row].tolist()
        assert values[4] == pytest.approx(column.begin(news[0])), column.name
        assert values[2] == pytest.approx(column.begin(news[1])), column.name
        assert all(values[slot] == column.neutral for slot in (0, 1, 3, 5, 6)), column.name


@pytest.mark.parametrize("kernels", KERNELS)
def test_greedy_is_temperature_zero(kernels: str, device: torch.device) -> None:
    run = on(kernels, device)
    tables = SlotTables(ROWS, PAGES, device)
    rings = Rings(Entries(LIMITS, 2, device), device)
    buffers = StepBuffers(tables, LIMITS, HiddenShape(8, torch.float32))
    new = NewSlot(2, SamplingParams(temperature=0.9, top_k=1, seed=2**63 - 1), ints([]), ints([]), 3)
    rings.write(StepPlan(1, ints([]), new_slots=(new,)))
    view = buffers.view(Forward(ROWS, ROWS, 0, ROWS))
    run.begin_step(rings.entries, tables, view, buffers.samples, page_size=PAGE)
    assert float(tables.temperature[2]) == 0.0
    assert int(tables.seed[2]) == 2**63 - 1
    assert view.counts.tolist() == [0, 0, 0, 0]


@pytest.mark.gpu
def test_what_is_launched_reads_its_own_entry(device: torch.device) -> None:
    """Without graphs warm-ups may still be under way when the first entry is written: they read another."""
    tables = SlotTables(ROWS, PAGES, device)
    rings = Rings(Entries(LIMITS, 2, device), device)
    buffers = StepBuffers(tables, LIMITS, HiddenShape(8, torch.float32))
    view = buffers.view(Forward(ROWS, ROWS, 0, ROWS))
    busy: Any = torch.cuda._sleep  # untyped

    def launch(entries: EntryRing) -> None:
        begin_step(entries, tables, view, buffers.samples, page_size=PAGE)

    launch(rings.empty)  # compiles
    busy(1_000_000_000)  # cycles, half a second
    launch(rings.empty)
    new = NewSlot(2, SamplingParams(seed=7), ints([]), ints([]), 3)
    rings.write(StepPlan(1, ints([]), new_slots=(new,)))
    assert int(tables.seed[2]) == 0
    launch(rings.entries)
    assert int(tables.seed[2]) == 7


def test_masks_forbid(device: torch.device, dtype: torch.dtype) -> None:
    vocab = 70
    logits = torch.randn(4, vocab, device=device).to(dtype)
    logits[1, 5] = float("nan")
    before = logits.clone()
    allowed = np.zeros((2, 64), bool)
    allowed[0, [3, 40]] = allowed[1, 0] = True
    bits = torch.from_numpy(np.packbits(allowed, axis=1, bitorder="little").view(np.int32)).to(device)
    which = torch.tensor([-1, 0, -1, 1], dtype=torch.int32, device=device)
    mask_rows(logits, MaskRows(which, bits), torch.tensor([3], dtype=torch.int32, device=device))
    assert torch.equal(logits[[0, 2, 3]], before[[0, 2, 3]])  # free, free, and behind the true rows
    assert logits[1].isfinite().nonzero().flatten().tolist() == [3, 40]
    assert logits[1, 5].isnan(), "a broken row stays visible"
