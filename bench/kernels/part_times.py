"""Times of small kernels between the GEMMs of a step: RoPE tables, KV packing, merging of attention parts,
the MoE reduction, FP8 quantisation."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from torch.nn.functional import pad

from bench.kernels import inputs
from bench.kernels.checks import DEVICE, DTYPE, randn
from bench.kernels.inputs import Heads, MoeSize
from bench.kernels.timing import Row, microseconds
from core.models.quant import BLOCK
from gpu.attention.flashinfer_fa3 import KEYS_PER_TOKEN, PACK_TILE, PAIRS_PER_KEY
from gpu.cuda import MAX_CHUNKS
from gpu.kernels.attention.kv_packing import pack, plan_packing
from gpu.kernels.attention.pages import kernel_args
from gpu.kernels.attention.prefill_merge import merge_blocks, prefill_space
from gpu.kernels.attention.prefill_plan import Chunks, PrefillConfig, plan_prefill, prefill_config
from gpu.kernels.attention.rope import rope_rows
from gpu.kernels.gemm.quant import quantise_rows
from gpu.kernels.moe.combine import moe_sum
from gpu.kernels.moe.route import Routing

COPIES = 4
"""Input sets: few, because in a step the kernel before has just written the inputs, mostly to L2."""

TOKENS = (32, 256, 512, 2048)
HEADS = (Heads(), Heads(32, 8, 128))
"""Heads of Qwen3-30B-A3B and Qwen3-8B."""

PACKED = {
    "1 x 2048": [(0, 2048)],
    "2 x 1024": [(0, 1024)] * 2,
    "1 x 2048 at 2048": [(2048, 2048)],
    "32 x 64": [(0, 64)] * 32,
}
"""(start, tokens) of chunks; the last case is too small to be packed."""

JOINED = {
    "16 at 2048": [(2048, 16)],
    "128 at 2048": [(2048, 128)],
    "256 at 8192": [(8192, 256)],
    "4 x 64 at 2048": [(2048, 64)] * 4,
}
"""(start, tokens) of chunks whose keys are split over several programs."""

QUANTISED = {"2048": (2048, 1), "4096": (4096, 1), "12288": (12_288, 1), "768, 8 a token": (768, 8)}
"""Width and rows per token: inputs of the GEMMs of both models, and of the second MoE GEMM."""


def _chunks(sizes: list[tuple[int, int]], kept: inputs.Pages) -> Chunks:
    """Chunks padded to the size that a graph has."""
    slots, starts, firsts, _ = inputs.chunks(sizes, kept, 0, DEVICE)
    slots, starts, firsts = (pad(each, (0, MAX_CHUNKS - len(slots))) for each in (slots, starts, firsts))
    return Chunks(slots, starts, firsts, inputs.scalar(len(sizes), DEVICE))


def _rope_tables() -> Iterator[Row]:
    """Bytes: a position is read, cosines and sines of a head are written."""
    half = Heads().dim // 2
    turns = 1e6 ** (-torch.arange(half, device=DEVICE) / half)
    for rows in (1, *TOKENS):
        positions = [torch.randint(40_960, (rows,), device=DEVICE).int() for _ in range(COPIES)]
        calls = [partial(rope_rows, each, turns, 1.0, DTYPE) for each in positions]
        yield Row("rope_rows", f"{rows} x {2 * half}", microseconds(calls), rows * (4 + 2 * 2 * half * 2))


def _packing() -> Iterator[Row]:
    """Bytes: keys and values are read from pages and written contiguously, with zeros as padding."""
    for (name, sizes), heads in product(PACKED.items(), HEADS):
        lengths, rows = [sum(size) for size in sizes], sum(tokens for _, tokens in sizes)
        room, pairs = KEYS_PER_TOKEN * rows, PAIRS_PER_KEY * heads.kv / heads.q
        side = [torch.zeros(room, heads.kv, heads.dim, dtype=DTYPE, device=DEVICE) for _ in range(2)]
        calls = []
        for _ in range(COPIES):
            kept = inputs.pages(lengths, 16, heads, DTYPE, DEVICE)
            cut = _chunks(sizes, kept)
            places = plan_packing(cut, pairs, room, PACK_TILE).places
            cache = kept.k, kept.v
            calls.append(partial(pack, cache, (side[0], side[1]), places, cut, kept.table, 16, PACK_TILE))
        keys = sum(length + -(-length // PACK_TILE) * PACK_TILE for length in lengths)
        moved, note = (
            (keys * 2 * heads.kv * heads.dim * 2, "") if int(places[0]) >= 0 else (0, "(not packed)")
        )
        yield Row("pack", f"{name}, {heads.kv} x {heads.dim}", microseconds(calls), moved, 0.0, note)


def _merge_bytes(items: torch.Tensor, config: PrefillConfig, heads: Heads) -> float:
    """float32 results and a log-sum-exp of each query from each part that its block has, then one result.
    How many parts that are is `prefill_plan.read_entry`."""
    group = heads.q // heads.kv
    _, _, start, tokens, at, _, part, parts = items.long().unbind(1)
    end = start + torch.minimum((at + config.queries - 1) // group + 1, tokens)
    pieces = torch.minimum(parts, -(-end // config.tile) // config.least)
    queries = torch.clamp(tokens * group - at, max=config.queries) * (tokens > 0) * (pieces > 1)
    read, made = int(queries[part < pieces].sum()), int(queries[part == 0].sum())
    return heads.kv * (read * (heads.dim + 1) * 4 + made * heads.dim * 2)


def _merging() -> Iterator[Row]:
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for (name, sizes), heads in product(JOINED.items(), HEADS):
        rows, group = sum(tokens for _, tokens in sizes), heads.q // heads.kv
        config = prefill_config(heads.dim, DTYPE, heads.kv, processors)
        kept = inputs.pages([sum(size) for size in sizes], 16, heads, DTYPE, DEVICE)
        plan = plan_prefill(_chunks(sizes, kept), rows, group, config)
        calls = []
        for _ in range(COPIES):
            space = prefill_space(config, heads.kv, heads.dim, DEVICE)
            assert space is not None
            space.out.normal_()
            space.lse.normal_()
            out = torch.empty(rows, heads.q * heads.dim, dtype=DTYPE, device=DEVICE)
            _, shape = kernel_args(randn(rows, heads.q, heads.dim), kept.layer(16, 0.1))
            calls.append(partial(merge_blocks, plan, space, config, out, shape))
        moved = _merge_bytes(plan, config, heads)
        yield Row("merge_blocks", f"{name}, {heads.q}/{heads.kv}/{heads.dim}", microseconds(calls), moved)


def _moe_reduction() -> Iterator[Row]:
    """Bytes: expert outputs, weights and ids are read, the residual read and written, its norm written."""
    size = MoeSize()
    for rows in TOKENS:
        calls = []
        for _ in range(COPIES):
            chosen = torch.randn(rows, size.experts, device=DEVICE).topk(size.top_k)
            routing = Routing(chosen.values.softmax(-1), chosen.indices.int())
            found, residual = randn(rows * size.top_k, size.hidden), randn(rows, size.hidden)
            calls.append(partial(moe_sum, found, routing, DTYPE, (residual, randn(size.hidden), 1e-6)))
        moved = rows * ((size.top_k + 3) * size.hidden * 2 + size.top_k * (4 + 4))
        yield Row("moe_sum", f"{rows} x {size.top_k} x {size.hidden}", microseconds(calls), moved)


def _quantisation() -> Iterator[Row]:
    for (name, (width, per)), group, tokens in product(QUANTISED.items(), (0, BLOCK), (32, 512, 2048)):
        rows = tokens * per
        calls = [partial(quantise_rows, randn(rows, width), group=group) for _ in range(COPIES)]
        scales = width // group if group else 1
        case = f"{tokens} x {name}" + ", groups" * (group > 0)
        yield Row("quantise_rows", case, microseconds(calls), rows * (width * (2 + 1) + scales * 4))


def parts() -> Iterator[Row]:
    """RoPE tables, KV packing, merging of attention parts, MoE reduction, FP8 quantisation."""
    yield from _rope_tables()
    yield from _packing()
    yield from _merging()
    yield from _moe_reduction()
    yield from _quantisation()
