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
from gpu.state.entry import EntryRing, Limits
from gpu.state.tables import COLUMNS, SlotTables
from gpu.step import begin
from gpu.step.begin import BeginStep
from gpu.step.buffers import HiddenShape, StepBuffers
from gpu.step.rings import Entries, Rings
from gpu.step.steps import ExactSizes, Forward

ROWS, PAGES, PAGE, TOKENS = 6, 8, 4, 64
LIMITS = Limits(rows=ROWS, chunks=ROWS, tokens=TOKENS, writes=5, table_width=PAGES)


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
            self.lengths[slot] = length
            self.samples.append((row, slot, length))
        self.chunks = []
        for chunk in plan.chunks:
            self.chunks.append((chunk.slot, chunk.start, len(owners)))
            self.ids += chunk.tokens.tolist()
            owners += [(chunk.slot, chunk.start + i) for i in range(len(chunk.tokens))]
            self.lengths[chunk.slot] = end = chunk.start + len(chunk.tokens)
            if chunk.samples:
                self.samples.append((len(owners) - 1, chunk.slot, end))
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
    buffers = StepBuffers(tables, TOKENS, ROWS, ROWS, HiddenShape(8, torch.float32))
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
        assert tables.length.tolist() == expected.lengths
        # Sampled tokens come back through the ring, and stand in their cells in the next step.
        tokens = torch.arange(s, device=device) + 100 * plan.step
        run.last.emit(tokens, rings.cursor, buffers.num_samples, rings.answers)
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert rings.read(ticket).tolist() == tokens.tolist()
        for (_, slot, _), token in zip(expected.samples, tokens.tolist(), strict=True):
            expected.cells[slot] = token
            tables.last_token[slot] = token
    for slot, new in {new.slot: new for new in plan.new_slots}.items():
        held = [float(table[slot]) for table in (tables.temperature, tables.top_p, tables.min_p)]
        assert held == pytest.approx([new.params.temperature, new.params.top_p, new.params.min_p])
        assert (tables.top_k[slot], tables.seed[slot]) == (new.params.top_k, new.params.seed)
    for column in COLUMNS:
        assert float(tables.columns[column.row][0]) == column.neutral, column.name
    assert tables.page_table.tolist() == expected.pages
    assert surpluses, "no plan was larger than its entry"


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_new_slots_words_reach_their_columns(kernels: str, device: torch.device) -> None:
    """Of a slot among others, each column its own value."""
    run = on(kernels, device)
    tables, rings = SlotTables(ROWS, PAGES, device), Rings(Entries(LIMITS, 2, device), device)
    buffers = StepBuffers(tables, TOKENS, ROWS, ROWS, HiddenShape(8, torch.float32))
    params = SamplingParams(
        temperature=0.9, top_k=5, top_p=0.5, min_p=0.25, seed=2**61 + 7, repetition_penalty=1.5,
        frequency_penalty=0.75, presence_penalty=-0.5,
    )  # fmt: skip
    news = tuple(NewSlot(slot, params, ints([]), ints([]), 3 * slot, slot) for slot in (4, 2))
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
    buffers = StepBuffers(tables, TOKENS, ROWS, ROWS, HiddenShape(8, torch.float32))
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
    buffers = StepBuffers(tables, TOKENS, ROWS, ROWS, HiddenShape(8, torch.float32))
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
