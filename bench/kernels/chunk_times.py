"""Times of prefill attention, and of FlashInfer's if it is installed."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from typing import Any

import torch

from bench.kernels import inputs
from bench.kernels.checks import DEVICE, DTYPE, randn
from bench.kernels.compile import compiling
from bench.kernels.inputs import Heads
from bench.kernels.timing import Row, microseconds
from gpu.attention.backend import AttentionConfig, PhaseAttention
from gpu.attention.flashinfer_fa3 import FlashInferPrefill
from gpu.attention.triton_paged import TritonPrefill
from gpu.device import cuda_facts
from gpu.kernels.attention import prefill, prefill_plan
from gpu.kernels.attention.pages import Pages
from gpu.kernels.attention.prefill_plan import Chunks
from gpu.state.view import StepView

CHUNK_CUTS = (
    (128, 64, 8, 5, True), (128, 64, 8, 3, True), (128, 64, 8, 7, True), (128, 64, 8, 5, False),
    (128, 128, 8, 3, False), (128, 128, 8, 5, False), (128, 32, 8, 5, True), (64, 64, 4, 3, True),
    (64, 64, 4, 3, False), (64, 32, 4, 5, True),
)  # fmt: skip
"""Fields of `PrefillConfig` to compare."""


STEPS: dict[str, list[tuple[int, int]]] = {
    "1 x 8192": [(0, 8192)],
    "4 x 2048 at 8192": [(8192, 2048)] * 4,
    "4 x 2048 at 2048": [(2048, 2048)] * 4,
    "2 x 4096": [(0, 4096)] * 2,
    "8 x 1024": [(0, 1024)] * 8,
    "1 x 2048": [(0, 2048)],
    "2 x 1024": [(0, 1024)] * 2,
    "1 x 2048 at 2048": [(2048, 2048)],
    "32 x 64": [(0, 64)] * 32,
    "8 x 128 at 2048": [(2048, 128)] * 8,
}
"""(start, tokens) of chunks: the two that FlashInfer was measured with, then steps of 8,192 tokens and of
2,048 and less, as in the scenarios."""

SHORT: dict[str, list[tuple[int, int]]] = {
    f"{tokens} at {start}": [(start, tokens)]
    for start in (0, 2048, 8192, 32_768)
    for tokens in (16, 64, 128, 256, 512)
} | {"4 x 64 at 2048": [(2048, 64)] * 4, "8 x 1024": [(0, 1024)] * 8}
"""(start, tokens) of chunks with few queries over many keys, and steps that must not become slower."""


def _pairs(sizes: list[tuple[int, int]]) -> int:
    """Number of query-key pairs."""
    return sum(tokens * start + tokens * (tokens + 1) // 2 for start, tokens in sizes)


def _chunk_row(
    heads: Heads, page: int, name: str, config: prefill_plan.PrefillConfig, room: int, goal: str
) -> Row:
    """Time of one step, in a graph for up to `room` chunks."""
    sizes = STEPS[name]
    kept = inputs.pages([start + tokens for start, tokens in sizes], page, heads, DTYPE, DEVICE)
    cut = inputs.chunks(sizes, kept, 0, DEVICE)
    slots, starts = (torch.zeros(room, dtype=torch.int32, device=DEVICE) for _ in range(2))
    firsts = torch.zeros(room + 1, dtype=torch.int32, device=DEVICE)
    n = len(sizes)
    slots[:n], starts[:n], firsts[: n + 1] = cut.slots[:n], cut.starts[:n], cut.firsts[: n + 1]
    rows = sum(tokens for _, tokens in sizes)
    count = inputs.scalar(n, DEVICE)
    plan = prefill_plan.plan_prefill(Chunks(slots, starts, firsts, count), rows, heads.q // heads.kv, config)
    args = (
        randn(rows, heads.q, heads.dim),
        kept.layer(page, heads.dim**-0.5),
        plan,
        config,
    )
    us = microseconds([partial(prefill.paged_prefill, *args)])
    keys = sum(start + tokens for start, tokens in sizes)
    moved = 2 * heads.dim * (2 * keys * heads.kv + 2 * rows * heads.q)
    described = f"t{config.queries}x{config.tile} w{config.warps} s{config.stages}{' ahead' * config.ahead}"
    note = f"{described} C{room} {goal}"
    flops = 4.0 * heads.dim * heads.q * _pairs(sizes)
    shape = f"{name} {heads.q}/{heads.kv}/{heads.dim} p{page}"
    return Row("paged_prefill", shape, us, moved, flops, note)


def chunks() -> Iterator[Row]:
    """Prefill: the default config at the steps of the scenarios, other configs at three of them."""
    base = prefill_plan.prefill_config(128, DTYPE)
    for name in STEPS:
        for heads in (Heads(), Heads(32, 8, 128)):
            goal = {"1 x 8192": "(FA3 554)", "4 x 2048 at 8192": "(FA3 585)"}.get(name, "")
            yield _chunk_row(heads, 16, name, base, 64, goal)
    yield _chunk_row(Heads(), 16, "1 x 2048", base, 512, "empty programs")
    for page in (1, 64):
        yield _chunk_row(Heads(), page, "1 x 8192", base, 64, "")
    for heads, cuts in (
        (Heads(16, 8, 256), ((128, 64, 8, 3, False), (128, 32, 8, 5, False), (64, 64, 8, 3, True))),
        (Heads(14, 2, 64), ((128, 64, 8, 5, True), (128, 128, 8, 5, False), (128, 64, 8, 5, False))),
    ):
        for cut in cuts:
            yield _chunk_row(heads, 16, "1 x 8192", prefill_plan.PrefillConfig(*cut), 64, "")
    for name in ("1 x 8192", "1 x 2048", "1 x 2048 at 2048"):
        rows = [_chunk_row(Heads(), 16, name, prefill_plan.PrefillConfig(*cut), 64, "") for cut in CHUNK_CUTS]
        yield from sorted(rows, key=lambda row: row.us)[:4]
    for room in (8, 64, 512):
        tables = torch.zeros(3, room + 1, dtype=torch.int32, device=DEVICE)
        tables[2, 1:] = 2048
        step = Chunks(tables[0, :room], tables[1, :room], tables[2], inputs.scalar(1, DEVICE))
        us = microseconds([partial(prefill_plan.plan_prefill, step, 2048, 8, base)])
        yield Row(
            "plan_prefill",
            f"2048 tokens, {room} chunks",
            us,
            prefill_plan.max_blocks(2048, room, 8, base) * 32,
        )
    yield from short_chunks()


def _view(sizes: list[tuple[int, int]], kept: inputs.Pages, deep: bool, room: int = 64) -> StepView:
    """A step of these chunks only, in a graph for its number of tokens and `room` chunks."""
    n, rows = len(sizes), sum(tokens for _, tokens in sizes)
    cut, blank = inputs.chunks(sizes, kept, 0, DEVICE), torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    slots, starts, firsts = (blank.new_zeros(room + 1) for _ in range(3))
    slots[:n], starts[:n], firsts[: n + 1] = cut.slots[:n], cut.starts[:n], cut.firsts[: n + 1]
    counts = torch.tensor([rows, 0, n, n], dtype=torch.int32, device=DEVICE)
    lists = blank, blank, slots[:room], starts[:room], firsts
    return StepView(rows, 0, room, counts, blank, blank, blank, kept.table, *lists, blank[:1], deep=deep)


def short_chunks() -> Iterator[Row]:
    """Chunks of few queries, as the backends run them: FA3 for every graph, and our kernels."""
    gpu, made = cuda_facts(), {}
    for name, heads in product(SHORT, (Heads(32, 8, 128), Heads())):
        sizes, scale = SHORT[name], heads.dim**-0.5
        config = AttentionConfig(*heads, (0,), 16, 1, DTYPE, torch.device(DEVICE), gpu, scale, pdl=True)
        if heads not in made:
            backends: dict[str, PhaseAttention] = {"ours": TritonPrefill(config)}
            if find_spec("flashinfer") is not None:
                backends["FA3"] = FlashInferPrefill(config)
            made[heads] = backends
        lengths = [start + tokens for start, tokens in sizes]
        moved = 4 * sum(lengths) * heads.kv * heads.dim
        for label, backend in made[heads].items():
            calls = []
            for _ in range(max(1, min(6, 120_000_000 // moved))):
                kept = inputs.pages(lengths, 16, heads, DTYPE, DEVICE)
                wide = 4096 - kept.table.shape[1]  # as in a server: kernels are specialised for its stride
                padded = kept._replace(table=torch.nn.functional.pad(kept.table, (0, wide)))
                view = _view(sizes, padded, deep=label == "ours")
                one = copy(backend)
                one.plan(view)
                q = randn(view.tokens, heads.q, heads.dim)
                cache = kept.k, kept.v
                calls.append(partial(one.attend, 0, q, cache, view, torch.empty_like(q).flatten(1)))
            flops = 4.0 * heads.dim * heads.q * _pairs(sizes)
            yield Row(
                label, f"{name} {heads.q}/{heads.kv}/{heads.dim} p16", microseconds(calls), moved, flops
            )


def flashinfer() -> Iterator[Row]:
    """The steps of `chunks` with FlashInfer's FA3, if it is installed; the first compiles for a minute."""
    if find_spec("flashinfer") is None:
        return
    library: Any = import_module("flashinfer")
    make = library.BatchPrefillWithPagedKVCacheWrapper
    space = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
    for name, heads in product(STEPS, (Heads(), Heads(32, 8, 128))):
        sizes = STEPS[name]
        lengths = [start + tokens for start, tokens in sizes]
        kept = inputs.pages(lengths, 16, heads, DTYPE, DEVICE)
        counts = torch.tensor([0] + [-(-length // 16) for length in lengths]).cumsum(0).int()
        rows = torch.tensor([0] + [tokens for _, tokens in sizes]).cumsum(0).int()
        own = kept.table[kept.slots].cpu()
        indices = torch.cat([row[: -(-length // 16)] for row, length in zip(own, lengths, strict=True)])
        last = torch.tensor([(length - 1) % 16 + 1 for length in lengths], dtype=torch.int32)
        wrapper = make(space, "NHD", backend="fa3")
        tables = (each.to(DEVICE) for each in (rows, counts, indices, last))
        wrapper.plan(*tables, heads.q, heads.kv, heads.dim, 16, causal=True, q_data_type=DTYPE)
        q = randn(int(rows[-1]), heads.q, heads.dim)
        cache = tuple(side.view(-1, 16, heads.kv, heads.dim) for side in (kept.k, kept.v))
        us = microseconds([partial(wrapper.run, q, cache, out=torch.empty_like(q))])
        flops = 4.0 * heads.dim * heads.q * _pairs(sizes)
        yield Row("flashinfer FA3", f"{name} {heads.q}/{heads.kv}/{heads.dim} p16", us, 0.0, flops)


def compile_chunks(cut: tuple[int, int, int, int, bool]) -> None:
    """Compile prefill at one of CHUNK_CUTS, in the pool of `tune.compile_all`."""
    heads, config = Heads(), prefill_plan.PrefillConfig(*cut)
    both, q = torch.empty(64, 2, heads.kv, heads.dim, dtype=DTYPE), torch.empty(2048, 32, 128, dtype=DTYPE)
    table = torch.empty(65, 64, dtype=torch.int32)
    ints = torch.empty(65, dtype=torch.int32)
    with compiling():
        plan = prefill_plan.plan_prefill(Chunks(ints[:64], ints[:64], ints, ints[:1]), 2048, 8, config)
        layer = Pages(both[:, 0], both[:, 1], table, 16, heads.dim**-0.5)
        prefill.paged_prefill(q, layer, plan, config)
