"""A plan's way to the device: tables and view are what the plain gather makes of it, padding is neutral,
tokens come back in order, and masks forbid what they should."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from core.plan import Chunk, NewSlot, PageWrites, StepPlan
from core.request import SamplingParams
from core.types import Ints
from gpu.inputs import gather
from gpu.kernels.sampling.adjust import mask_rows
from gpu.kernels.step import begin_step, emit
from gpu.sample.kernels import MaskRows
from gpu.state.entry import Limits
from gpu.state.slots import SlotState
from gpu.state.tables import SlotTables
from gpu.step.buffers import StepBuffers
from gpu.step.rings import Rings

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


@pytest.mark.parametrize("seed", range(4))
def test_orders_become_tables_and_views(seed: int, device: torch.device) -> None:
    tables = SlotTables(ROWS, PAGES, device)
    plain = SlotState(ROWS, PAGES, device)
    rings = Rings(LIMITS, 3, device)
    buffers = StepBuffers(tables, TOKENS, ROWS, ROWS, (8, torch.float32))
    plans = Plans(seed)
    surpluses = 0
    for _ in range(12):
        plan = plans.next()
        plain.apply(plan)
        expected = gather(plan, plain, PAGE)
        view = buffers.view(TOKENS if plan.chunks else ROWS, mixed=bool(plan.chunks))
        ticket = rings.write(plan)
        if ticket.surplus is not None:
            tables.page_table.view(-1).index_copy_(
                0, *(torch.from_numpy(each).to(device) for each in ticket.surplus[:2])
            )
        begin_step(rings.orders, rings.cursor, rings.at, tables, view, buffers.samples, page_size=PAGE)
        surpluses += len(plan.page_writes.slots) > LIMITS.writes
        n, d, c, s = len(expected.ids), len(plan.decode_slots), len(plan.chunks), plan.num_samples
        assert view.counts.tolist() == [n, d, c, s]
        assert view.common.tolist() == [0]
        for made, wanted in [
            (view.ids, expected.ids),
            (view.positions, expected.positions),
            (view.kv_slot_mapping, expected.where),
            (view.decode_slots[:d], expected.decode_slots),
            (view.decode_lengths[:d], expected.decode_lengths),
            (buffers.samples.rows[:s], expected.sample_rows),
            (buffers.samples.slots[:s], expected.sample_slots),
            (buffers.samples.positions[:s], expected.sample_positions),
        ]:
            assert made[: len(wanted)].tolist() == wanted.tolist()
        for padding in (view.ids[n:], view.positions[n:], view.kv_slot_mapping[n:], view.decode_slots[d:]):
            assert not padding.any()
        if plan.chunks:
            assert view.chunk_slots[:c].tolist() == [chunk.slot for chunk in expected.chunks]
            assert view.chunk_starts[:c].tolist() == [chunk.start for chunk in expected.chunks]
            assert view.chunk_firsts[: c + 1].tolist() == [chunk.first for chunk in expected.chunks] + [n]
        assert tables.length.tolist() == plain.length.tolist()
        # Sampled tokens come back through the ring, and stand in their cells in the next step.
        tokens = torch.arange(s, device=device) + 100 * plan.step
        emit(tokens, rings.cursor, buffers.num_samples, rings.answers)
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert rings.read(ticket).tolist() == tokens.tolist()
        plain.write_tokens(expected.sample_slots, tokens)
        tables.last_token[expected.sample_slots] = tokens.int()
    for slot, new in {new.slot: new for new in plan.new_slots}.items():
        held = [float(table[slot]) for table in (tables.temperature, tables.top_p, tables.min_p)]
        assert held == pytest.approx([new.params.temperature, new.params.top_p, new.params.min_p])
        assert (tables.top_k[slot], tables.seed[slot]) == (new.params.top_k, new.params.seed)
    assert torch.equal(tables.page_table, plain.page_table)
    assert surpluses, "no plan was larger than its entry"


def test_greedy_is_temperature_zero(device: torch.device) -> None:
    tables = SlotTables(ROWS, PAGES, device)
    rings = Rings(LIMITS, 2, device)
    buffers = StepBuffers(tables, TOKENS, ROWS, ROWS, (8, torch.float32))
    new = NewSlot(2, SamplingParams(temperature=0.9, top_k=1, seed=2**63 - 1), ints([]), ints([]), 3)
    rings.write(StepPlan(1, ints([]), new_slots=(new,)))
    view = buffers.view(ROWS, mixed=False)
    begin_step(rings.orders, rings.cursor, rings.at, tables, view, buffers.samples, page_size=PAGE)
    assert float(tables.temperature[2]) == 0.0
    assert int(tables.seed[2]) == 2**63 - 1
    assert view.counts.tolist() == [0, 0, 0, 0]


@pytest.mark.gpu
def test_what_is_launched_reads_its_own_order(device: torch.device) -> None:
    """Without graphs warm-ups were still under way when the first order was written in their place."""
    tables = SlotTables(ROWS, PAGES, device)
    rings = Rings(LIMITS, 2, device)
    buffers = StepBuffers(tables, TOKENS, ROWS, ROWS, (8, torch.float32))
    view = buffers.view(ROWS, mixed=False)
    busy: Any = torch.cuda._sleep  # untyped

    def launch(seed: int) -> None:
        new = NewSlot(2, SamplingParams(seed=seed), ints([]), ints([]), 3)
        rings.write(StepPlan(1, ints([]), new_slots=(new,)))
        begin_step(rings.orders, rings.cursor, rings.at, tables, view, buffers.samples, page_size=PAGE)

    launch(5)  # compiles
    busy(1_000_000_000)  # cycles, half a second
    launch(7)
    rings.clear()
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
