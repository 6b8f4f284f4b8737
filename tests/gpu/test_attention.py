"""The contract of `AttentionBackend`, against a loop over rows, heads and positions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from core.plan import Chunk, NewSlot, PageWrites, StepPlan
from core.request import SamplingParams
from gpu.attention import TorchAttention, TorchBackend
from gpu.attention.cpu_paged import CpuAttention
from gpu.kernels.cpu import kernels
from gpu.kv.pool import KvPool
from gpu.thread import device_thread
from tests.rigs.views import Views

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM = 6, 2, 8
PAGES = 64


@pytest.fixture(params=["torch", "cpu"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "cpu" and kernels() is None:
        pytest.skip("no compiler, or no CPU with AVX2")
    monkeypatch.setattr(Table, "cpu", request.param == "cpu")


@pytest.fixture(autouse=True)
def on_device() -> Iterator[None]:
    with device_thread(CPU):
        yield


class Table:
    """One layer's cache as plain lists, and the backend under test."""

    cpu = False

    def __init__(self, page_size: int, window: int, consecutive: bool = False) -> None:
        self.size, self.window = page_size, window
        self.pool = KvPool(2, PAGES, page_size, (KV_HEADS, DIM), torch.float32, CPU)
        self.views = Views(4, 40, page_size, 256)
        self.slots = self.views.tables
        self.backend: TorchBackend = TorchAttention([0, window])
        if self.cpu and (own := kernels()) is not None:
            self.backend = CpuAttention([0, window], DIM**-0.5, own)
        self.backend.bind(self.pool)
        self.random = torch.Generator().manual_seed(5)
        self.kept: dict[int, list[torch.Tensor]] = {}
        order = np.arange(1, PAGES) if consecutive else np.random.default_rng(1).permutation(PAGES - 1) + 1
        self.free = order.tolist()[::-1]

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random)

    def step(self, layer: int, decode: list[int], chunks: list[tuple[int, int]]) -> None:
        """Run `decode` slots and `chunks` (slot, tokens); check every output row."""
        cells, new = [], []
        for slot, count in [(slot, 1) for slot in decode] + chunks:
            if slot not in self.kept:
                self.kept[slot] = []
                new.append(NewSlot(slot, SamplingParams(), ints(0), ints(0), 0))
            length = len(self.kept[slot])
            have = -(-length // self.size)
            cells += [(slot, i, self.free.pop()) for i in range(have, -(-(length + count) // self.size))]
        plan = StepPlan(
            1,
            np.array(decode, np.int32),
            tuple(Chunk(slot, len(self.kept[slot]), ints(count), False) for slot, count in chunks),
            tuple(new),
            PageWrites(*np.array(cells, np.int32).reshape(-1, 3).T),
        )
        view = self.views.take(plan)
        self.backend.plan(view)
        n = plan.num_tokens
        q, kv = self.draw(n, HEADS, DIM), self.draw(n, 2, KV_HEADS, DIM)
        self.backend.store(layer, kv)
        got = self.backend.attend(layer, q, view)
        at = 0
        for slot, count in [(slot, 1) for slot in decode] + chunks:
            for _ in range(count):
                self.kept[slot].append(kv[at])
                window = self.window if layer else 0
                torch.testing.assert_close(got[at], naive(q[at], self.kept[slot], window))
                at += 1


def ints(count: int) -> np.ndarray:
    return np.zeros(count, np.int32)


def naive(q: torch.Tensor, kept: list[torch.Tensor], window: int) -> torch.Tensor:
    """One query [heads, dim] over a list of K and V [2, kv_heads, dim], oldest first."""
    seen = torch.stack(kept[-window:] if window else kept)
    outs = []
    for head in range(HEADS):
        k, v = seen[:, 0, head * KV_HEADS // HEADS], seen[:, 1, head * KV_HEADS // HEADS]
        shares = (k @ q[head] / DIM**0.5).softmax(0)
        outs.append(shares @ v)
    return torch.cat(outs)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(("layer", "window"), [(0, 9), (1, 9), (1, 1), (1, 30)])
@pytest.mark.parametrize("consecutive", [False, True])
def test_every_mix_of_rows(page_size: int, layer: int, window: int, consecutive: bool) -> None:
    table = Table(page_size, window, consecutive)
    table.step(layer, [], [(1, 7)])
    table.step(layer, [], [(2, 1), (1, 5)])
    for _ in range(4):
        table.step(layer, [1], [])
    table.step(layer, [2, 1], [(3, 18)])
    for _ in range(6):
        table.step(layer, [3, 1, 2], [])


def test_a_long_chunk_is_cut_into_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu.attention.torch_paged.QUERY_BLOCK", 5)
    for layer in (0, 1):
        table = Table(4, 6)
        table.step(layer, [], [(1, 3)])
        table.step(layer, [], [(1, 23), (2, 11)])


def test_nothing_of_a_failed_request_reaches_the_next() -> None:
    table = Table(16, 5)
    table.pool.data[:, 1:] = float("nan")
    for layer in (0, 1):
        table.kept.clear()
        table.free = list(range(1, PAGES))
        table.step(layer, [], [(1, 20), (2, 3)])
        for _ in range(30):
            table.step(layer, [2, 1], [])


def test_stale_table_entries_are_not_read() -> None:
    table = Table(4, 0)
    table.pool.data[:, 50] = float("nan")
    table.slots.page_table[1:] = 50
    table.step(0, [], [(1, 30), (2, 2)])
    table.step(0, [1, 2], [])


@pytest.mark.parametrize(("layer", "window"), [(0, 3), (1, 3), (1, 200)])
def test_rows_of_very_different_length(layer: int, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu.attention.torch_paged.MERGED_KEYS", 4)
    table = Table(4, window)
    table.step(layer, [], [(1, 2), (2, 100), (3, 9), (4, 11)])
    for _ in range(5):
        table.step(layer, [3, 1, 2, 4], [])
    table.step(layer, [2, 1], [(3, 5)])
