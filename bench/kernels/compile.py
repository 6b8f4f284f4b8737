"""Compiles every kernel for sm_90 without a GPU and prints its resources: `python -m bench.kernels.compile`.

Registers, stack (spills), shared memory, and matrix instructions: HGMMA and, for FP8 and int8, QGMMA and
IGMMA are Hopper's, HMMA is the older one. Kernels with a stack and large-batch GEMMs without one of Hopper's
are slow.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from bench.kernels import inputs
from bench.kernels.compile_steps import step_cases
from bench.kernels.inputs import Heads, MoeSize
from bench.kernels.lora_inputs import blank_rows, lora_matrix, slots_view
from core.models import ClampedGate
from core.models.spec import W8A8, Fp8
from gpu.experts import Choice, Experts, Packed
from gpu.kernels import norm
from gpu.kernels import silu_mul as gated
from gpu.kernels.attention import cascade, decode, latent, prefill, prefill_merge, prefill_plan
from gpu.kernels.attention import merge_state as merge
from gpu.kernels.attention import qk_norm_rope_store as qkv
from gpu.kernels.attention.decode_config import latent_config, verify_config
from gpu.kernels.attention.decode_plan import plan_decode
from gpu.kernels.attention.pages import Pages, latent_parts
from gpu.kernels.gemm import gemv, int4, int4_gemv, scaled, skinny
from gpu.kernels.jit import cdiv
from gpu.kernels.lora import dense
from gpu.kernels.lora.linear import shrink_ahead
from gpu.kernels.lora_rows import lay_out
from gpu.kernels.moe import fused as moe
from gpu.kernels.moe.gemm_config import TileConfig
from gpu.kernels.moe.route import route
from gpu.kernels.moe.tuned import MoeConfig, MoeShape, rule, weight_name
from gpu.lora import LoraExperts
from gpu.ops.base import Matrix
from gpu.ops.scaled import scaled_linear
from gpu.quant.scaled import FP8, dtype_of, scale_shape

CPU = torch.device("cpu")
DTYPE = torch.bfloat16
SIZE = MoeSize(experts=128)
GPT_OSS, GPT_OSS_HEADS = MoeSize(32, 2880, 2880, 4), Heads(64, 8, 64)
CLAMPED = ClampedGate(alpha=1.702, limit=7.0)
EIGHT_BITS: dict[str, Fp8 | W8A8] = {"fp8 rows": "rows", "fp8 blocks": "blocks", "int8": W8A8()}


class _Device:
    """A fake driver that only returns the target to compile for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


def _cases(pdl: bool) -> dict[str, Callable[[], Any]]:
    """Calls that launch the kernels to compile, by name. Tensors are never read: only their types, sizes and
    the alignment of their addresses matter."""
    heads = Heads()
    n = inputs.scalar(64, CPU)

    def empty(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def attention(
        page: int,
        size: Heads,
        query: int = 1,
        sinks: bool = False,
        dtype: torch.dtype = DTYPE,
        rows: int = 256,
    ) -> None:
        config = verify_config(
            size.dim, size.kv, 132, rows * query, query, group=size.q // size.kv, coarse=dtype != DTYPE
        )
        slots, lengths = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
        table = torch.zeros(512, 64, dtype=torch.int32)
        both = empty(64, 2, size.kv, size.dim, dtype=dtype)
        plan = plan_decode(slots, lengths, config, longest=query, num_rows=n, pdl=pdl)
        space = decode.decode_workspace(rows, size.q, size.kv, size.dim, config, CPU)
        q = empty(rows, size.q, size.dim)
        layer = Pages(both[:, 0], both[:, 1], table, page, 0.1, sinks=empty(size.q) if sinks else None)
        decode.paged_decode(q, layer, plan, space, config, pdl=pdl)

    def chunks(
        page: int, size: Heads, dtype: torch.dtype = DTYPE, window: int = 0, sinks: bool = False
    ) -> None:
        config = prefill_plan.prefill_config(size.dim, DTYPE, size.kv, 132)
        space = prefill_merge.prefill_space(config, size.kv, size.dim, CPU)
        slots, firsts = torch.zeros(64, dtype=torch.int32), torch.zeros(65, dtype=torch.int32)
        table = torch.zeros(512, 64, dtype=torch.int32)
        both = empty(64, 2, size.kv, size.dim, dtype=dtype)
        step = prefill_plan.Chunks(slots, slots, firsts, n)
        plan = prefill_plan.plan_prefill(step, 2048, size.q // size.kv, config, pdl=pdl)
        q, more = empty(2048, size.q, size.dim), empty(size.q) if sinks else None
        layer = Pages(both[:, 0], both[:, 1], table, page, 0.1, sinks=more)
        prefill.paged_prefill(q, layer, plan, config, space, window=window, pdl=pdl)

    def latents(heads: int) -> Pages:
        """Pages of MLA's latents, of 512 + 64 columns."""
        k, table = empty(64, 1, 576), torch.zeros(512, 64, dtype=torch.int32)
        where, rope = torch.zeros(256, dtype=torch.int64), (empty(256, 1, 64), empty(256, 1, 64))
        q, own = empty(256, heads, 576), empty(256, heads, 192)
        norm_of = empty(512), 1e-6
        latent.latent_store(
            q, own[..., 128:], empty(256, 576), k, where, rope, norm_of, True, num_rows=n, pdl=pdl
        )
        return Pages(k, k[..., :512], table, 16, 0.1)

    def latent_rows(heads: int) -> None:
        parts = latent_parts(heads)
        config = latent_config(parts, 132)
        slots, lengths = torch.zeros(256, dtype=torch.int64), torch.zeros(256, dtype=torch.int64)
        plan = plan_decode(slots, lengths, config, num_rows=n, pdl=pdl)
        space = decode.decode_workspace(256, heads, parts, 512, config, CPU)
        decode.paged_decode(empty(256, heads, 576), latents(heads), plan, space, config, pdl=pdl)

    def latent_chunks(heads: int) -> None:
        parts = latent_parts(heads)
        config = prefill_plan.latent_prefill_config(parts, 132)
        space = prefill_merge.prefill_space(config, parts, 512, CPU)
        slots, firsts = torch.zeros(64, dtype=torch.int32), torch.zeros(65, dtype=torch.int32)
        step = prefill_plan.Chunks(slots, slots, firsts, n)
        plan = prefill_plan.plan_prefill(step, 2048, heads // parts, config, pdl=pdl)
        prefill.paged_prefill(empty(2048, heads, 576), latents(heads), plan, config, space, pdl=pdl)

    def choice(tokens: int, experts: int, how: Choice) -> None:
        logits = empty(tokens, experts, dtype=torch.float32)
        if how.sigmoid:
            how = how._replace(bias=empty(experts, dtype=torch.float32))
        route(logits, 8, 64, choice=how, num_rows=n, pdl=pdl)

    def prefix(config: cascade.PrefixConfig, dtype: torch.dtype = DTYPE) -> None:
        slots, table = torch.zeros(128, dtype=torch.int64), torch.zeros(512, 64, dtype=torch.int32)
        both = empty(64, 2, heads.kv, heads.dim, dtype=dtype)
        q, layer = empty(128, heads.q, heads.dim), Pages(both[:, 0], both[:, 1], table, 16, 0.1)
        cascade.prefix_attention(q, layer, slots, n, config, pdl=pdl)

    def experts(
        tokens: int,
        config: MoeConfig | None = None,
        held: Fp8 | W8A8 = "",
        rank: int = 0,
        *,
        of: MoeSize = SIZE,
        clamped: ClampedGate | None = None,
        packed: Packed = "",
        group: int = 128,
    ) -> None:
        """Compile an MoE layer. With `rank`, that of an adapter; with `clamped`, with biases too; `packed`: 4
        bits, by `group`."""
        name = weight_name(packed or held, "bfloat16")
        shape = MoeShape(of.experts, of.width, of.hidden, of.top_k, name, "H200")
        kind = dtype_of(held) if held else DTYPE
        x, logits = empty(tokens, of.hidden), empty(tokens, of.experts, dtype=torch.float32)
        weights = (
            empty(of.experts, 2 * of.width, of.hidden, dtype=kind),
            empty(of.experts, of.hidden, of.width, dtype=kind),
        )
        sizes = ([of.width] * 2, of.hidden), ([of.hidden], of.width)
        shapes = [scale_shape(held or "rows", *size) or () for size in sizes]
        scales = [empty(of.experts, *each, dtype=torch.float32) for each in shapes]
        after = empty(tokens, of.hidden), empty(of.hidden), 1e-6
        use = config or rule(shape, tokens, deep=bool(held))
        used = (scales[0], scales[1]) if held else None
        if packed == "int4":
            w13, w2 = (empty(*w.shape[:2], w.shape[2] // 4, dtype=torch.int16) for w in weights)
            s13, s2 = (empty(of.experts, w.shape[2] // group, w.shape[1], 2) for w in weights)
            weights, used = (w13, w2), (s13, s2)
        elif packed:
            (e, n13, hidden), (_, n2, width) = (w.shape for w in weights)
            steps = cdiv(hidden, 128), cdiv(width, 128)
            w13, w2 = (empty(e, n, 32 * k, dtype=torch.int16) for n, k in zip((n13, n2), steps, strict=True))
            s13, s2 = (empty(e, k, n, dtype=torch.int32) for n, k in zip((n13, n2), steps, strict=True))
            weights, used = (w13, w2), (s13, s2)
        lora, rows = LoraExperts(), None
        if rank:
            both = partial(lora_matrix, [rank], dtype=DTYPE, device=CPU, experts=(of.experts,) * 2)
            made = both(of.hidden, (of.width,) * 2), both(of.width, (of.hidden,))
            lora, rows = LoraExperts(*made), blank_rows(tokens, 1, CPU)
        biases = (empty(of.experts, 2 * of.width), empty(of.experts, of.hidden)) if clamped else None
        layer = Experts(*weights, of.top_k, scales=used, lora=lora, biases=biases, clamped=clamped)
        moe.fused_moe(x, logits, layer, use, after, adapters=rows, num_rows=n, pdl=pdl)

    def block_gemm_case(rows: int, name: str) -> None:
        outputs, size, _ = inputs.LINEARS[name]
        x, weight = empty(rows, size, dtype=FP8), empty(outputs, size, dtype=FP8)
        scales = (empty(n, size // 128, dtype=torch.float32) for n in (rows, outputs // 128))
        config = scaled.scaled_gemm_config(rows, outputs)
        scaled.scaled_gemm(x, next(scales), weight, next(scales), None, DTYPE, config, pdl=pdl)

    def scaled_case(rows: int, name: str, held: Fp8 | W8A8) -> None:
        outputs, size, both = inputs.LINEARS[name]
        weight, counters = empty(outputs, size, dtype=dtype_of(held)), skinny.split_k_counters(CPU)
        scale = empty(*scale_shape(held, [outputs], size) or (), dtype=torch.float32)
        few = skinny.skinny_scaled_config(rows, weight, held == "blocks", both) is not None
        assert few == (rows <= 64)
        scaled_linear(
            empty(rows, size), Matrix(weight, scale=scale), counters, gated=both, num_rows=n, pdl=pdl
        )

    def int4_case(rows: int, name: str, dtype: torch.dtype = DTYPE, group: int = 128) -> None:
        outputs, size, both = inputs.LINEARS[name]
        weight = empty(outputs, size // 4, dtype=torch.int16)
        scale, counters = empty(size // group, outputs, 2, dtype=dtype), skinny.split_k_counters(CPU)
        x = empty(rows, size, dtype=dtype)
        if (one := int4_gemv.int4_gemv_config(rows, weight, scale, both)) is not None:
            int4_gemv.int4_gemv(x, weight, scale, None, one, gated=both, pdl=pdl)
            return
        config = int4.int4_config(rows, weight, scale, both)
        if config is None:
            int4.int4_restore(weight, scale, pdl=pdl)
            return
        int4.int4_gemm(x, weight, scale, None, config, counters, gated=both, pdl=pdl)

    def gemv_case(rows: int, name: str, norm: bool = False, other: bool = False) -> None:
        """`norm` in front; with `other` its rows are stored, or the product is added to a residual."""
        outputs, size, both = inputs.LINEARS[name]
        weight = empty(outputs, size)
        config = gemv.gemv_config(rows, weight, both)
        assert config is not None
        x, by = empty(rows, size), (empty(size), 1e-6) if norm else None
        to, normed = empty(rows, outputs) if other and not norm else None, x if other and norm else None
        gemv.gemv(x, weight, None, config, gated=both, norm=by, residual=to, normed=normed, pdl=pdl)

    def skinny_case(rows: int, name: str) -> None:
        outputs, size, both = inputs.LINEARS[name]
        x, weight = empty(rows, size), empty(outputs, size)
        config = skinny.skinny_config(rows, weight, both)
        assert config is not None
        skinny.skinny_gemm(x, weight, None, config, skinny.split_k_counters(CPU), gated=both, pdl=pdl)

    def fused_qkv() -> None:
        both = empty(64, 2, heads.kv, heads.dim)
        rope = empty(256, 1, heads.dim), empty(256, 1, heads.dim)
        norms = empty(heads.dim), empty(heads.dim), 1e-6
        fused = empty(256, (heads.q + 2 * heads.kv) * heads.dim)
        kv_slot_mapping = torch.zeros(256, dtype=torch.int64)
        qkv.norm_rope_store(
            fused, (both[:, 0], both[:, 1]), kv_slot_mapping, rope, norms, num_rows=n, pdl=pdl
        )

    def wide_norm() -> None:
        norms = empty(heads.q * heads.dim), empty(heads.kv * heads.dim), 1e-6
        fused = empty(256, (heads.q + 2 * heads.kv) * heads.dim)
        norm.norm_wide(fused, norms, num_rows=n, pdl=pdl)
        means = norm.mean_squares(fused, (len(norms[0]), len(norms[1])), num_rows=n, pdl=pdl)
        norm.norm_wide(fused, norms, means, num_rows=n, pdl=pdl)

    def sampler() -> None:
        ints = torch.zeros(256, dtype=torch.int64)
        temperatures = empty(512, dtype=torch.float32)
        rows = inputs.sampling_rows(ints, ints, temperature=temperatures)
        logits = empty(256, 151_936, dtype=torch.float32)
        inputs.choose_tokens(logits, rows, filtered=True, pdl=pdl)

    def lora(rows: int, parts: tuple[int, ...], size: int) -> None:
        matrix = lora_matrix([16] * 8, size, parts, DTYPE, CPU)
        use = blank_rows(rows, 8, CPU)
        y = empty(rows, sum(parts))
        h = dense.shrink(empty(rows, size), matrix, use, pdl=pdl)
        dense.expand(h, matrix, use, y, pdl=pdl)
        gated = len(parts) == 2
        if gated:
            dense.expand_silu(h, matrix, use, y, num_rows=n, pdl=pdl)
        x, weight = empty(rows, size), empty(sum(parts), size)
        config = skinny.skinny_config(rows, weight, gated)
        if config is not None:
            delta = shrink_ahead(x, matrix, use, pdl=pdl)
            counters = skinny.split_k_counters(CPU)
            skinny.skinny_gemm(x, weight, None, config, counters, gated=gated, delta=delta, pdl=pdl)

    def lora_ends(rows: int) -> None:
        table = lora_matrix([16], 151_936, (4096,), DTYPE, CPU)
        head = lora_matrix([16], 4096, (151_936,), DTYPE, CPU)
        use = blank_rows(rows, 1, CPU)
        view = slots_view([0] * rows, [], rows, 0, CPU)
        lay_out(view, view.decode_slots, view.decode_slots, use, use, pdl=pdl)
        dense.embed(view.decode_slots, table, use, empty(rows, 4096), pdl=pdl)
        h = dense.shrink(empty(rows, 4096), head, use, pdl=pdl)
        dense.expand(h, head, use, empty(rows, 151_936, dtype=torch.float32), pdl=pdl)
        mixed = slots_view([0] * rows, [(0, 9)], rows + 9, 64, CPU)
        long = blank_rows(rows + 9, 8, CPU)
        lay_out(mixed, view.decode_slots, view.decode_slots, long, long, pdl=pdl)

    wide = TileConfig(128, 64, 8, 3, False, half=True, tma=True)
    tall = TileConfig(128, 64, 8, 4, False, tma=True)
    swapped = TileConfig(128, 64, 8, 3, True, half=True, tma=True)
    x = empty(256, 2048)
    lse, wide_lse = (empty(256, size, dtype=torch.float32) for size in (32, 64))
    return {
        "norm": lambda: norm.rms_norm(x, x[0], 1e-6, residual=x, num_rows=n, pdl=pdl),
        "norm, kept": lambda: norm.rms_norm(x, x[0], 1e-6, residual=x, keep=x, num_rows=n, pdl=pdl),
        "norm, added": lambda: norm.add_normed(x, x, x[0], 1e-6, num_rows=n, pdl=pdl),
        "norm of all heads": wide_norm,
        "linear 1": lambda: gemv_case(1, "8B o"),
        "linear 1, added": lambda: gemv_case(1, "8B o", other=True),
        "linear 1, normed": lambda: gemv_case(1, "8B qkv", norm=True),
        "linear 1, router, normed": lambda: gemv_case(1, "30B-A3B router", norm=True, other=True),
        "linear 1, gated, normed": lambda: gemv_case(1, "8B gate_up", norm=True),
        "linear 2": lambda: gemv_case(2, "8B down"),
        "linear 32": lambda: gemv_case(32, "30B-A3B router"),
        "linear gated": lambda: gemv_case(2, "8B gate_up"),
        "mid 8": lambda: skinny_case(8, "8B qkv"),
        "mid 8 gated": lambda: skinny_case(8, "8B gate_up"),
        "mid 32 two": lambda: skinny_case(32, "30B-A3B qkv"),
        "mid 32 split": lambda: skinny_case(32, "8B down"),
        "mid 32 gated": lambda: skinny_case(32, "8B gate_up"),
        "mid 64 split": lambda: skinny_case(64, "30B-A3B o"),
        "mid 64 gated": lambda: skinny_case(64, "8B gate_up"),
        **{
            f"{kind} {n} {name}": partial(scaled_case, n, name, held)
            for kind, held in EIGHT_BITS.items()
            for n in (8, 64)
            for name in ("8B o", "8B gate_up")
        },
        **{f"int8 {n} 8B qkv": partial(scaled_case, n, "8B qkv", W8A8()) for n in (129, 512, 4096)},
        **{
            f"int4 {n} {name}": partial(int4_case, n, name)
            for n in (1, 8, 16, 32, 64, 512)
            for name in ("8B o", "8B gate_up", "8B down")
        },
        "int4 1 float16": lambda: int4_case(1, "8B down", torch.float16, 32),
        "block 128": lambda: block_gemm_case(128, "8B qkv"),
        "block 512": lambda: block_gemm_case(512, "8B qkv"),
        "block 4096": lambda: block_gemm_case(4096, "8B qkv"),
        "gated": lambda: gated.silu_mul(x, num_rows=n, pdl=pdl),
        "gated, gelu": lambda: gated.gelu_mul(x, num_rows=n, pdl=pdl),
        "qkv": fused_qkv,
        "lora 1": lambda: lora(1, (4096, 1024, 1024), 4096),
        "lora 32": lambda: lora(32, (12_288, 12_288), 4096),
        "lora 32, split": lambda: lora(32, (4096,), 12_288),
        "lora 2048": lambda: lora(2048, (12_288, 12_288), 4096),
        "lora ends": lambda: lora_ends(256),
        "sample": sampler,
        "merge": lambda: merge.merge_state(empty(256, 32, 128), lse, empty(256, 32, 128), lse, pdl=pdl),
        "decode, page 1": lambda: attention(1, heads),
        "decode, page 16": lambda: attention(16, heads),
        "decode, page 64": lambda: attention(64, heads),
        "decode, one row": lambda: attention(16, heads, rows=1),
        "decode, one row, dim 256": lambda: attention(16, Heads(16, 8, 256), rows=1),
        "decode, fp8": lambda: attention(16, heads, dtype=torch.float8_e4m3fn),
        "decode, fp8, dim 256": lambda: attention(16, Heads(16, 8, 256), dtype=torch.float8_e4m3fn),
        "decode, dim 8": lambda: attention(16, Heads(8, 4, 8)),
        "decode, dim 256": lambda: attention(16, Heads(16, 8, 256)),
        "verify, 16 lanes": lambda: attention(16, Heads(32, 8, 128), 4),
        "verify, 32 lanes": lambda: attention(16, heads, 4),
        "verify, 64 lanes": lambda: attention(16, heads, 8),
        "verify, fp8": lambda: attention(16, heads, 4, dtype=torch.float8_e4m3fn),
        "verify, fp8, 64 lanes": lambda: attention(16, heads, 8, dtype=torch.float8_e4m3fn),
        "verify, dim 256": lambda: attention(16, Heads(16, 8, 256), 4),
        "chunks, page 16": lambda: chunks(16, heads),
        "chunks, page 64": lambda: chunks(64, heads),
        "chunks, 8 kv": lambda: chunks(16, Heads(32, 8, 128)),
        "chunks, dim 8": lambda: chunks(16, Heads(8, 4, 8)),
        "chunks, dim 64": lambda: chunks(16, Heads(14, 2, 64)),
        "chunks, dim 256": lambda: chunks(16, Heads(16, 8, 256)),
        "chunks, window": lambda: chunks(16, heads, window=1024),
        "chunks, fp8": lambda: chunks(16, heads, torch.float8_e4m3fn),
        "sinks, decode": lambda: attention(16, GPT_OSS_HEADS, sinks=True),
        "sinks, one row": lambda: attention(16, GPT_OSS_HEADS, sinks=True, rows=1),
        "sinks, verify": lambda: attention(16, GPT_OSS_HEADS, 4, sinks=True),
        "sinks, chunks": lambda: chunks(16, GPT_OSS_HEADS, sinks=True),
        "sinks, window": lambda: chunks(16, GPT_OSS_HEADS, window=128, sinks=True),
        "sinks, merge": lambda: merge.merge_state(
            empty(256, 64, 64), wide_lse, empty(256, 64, 64), wide_lse, sinks=empty(64), pdl=pdl
        ),
        "latents, decode": lambda: latent_rows(128),
        "latents, chunks": lambda: latent_chunks(128),
        **{
            f"experts in groups {n}": partial(choice, n, 256, Choice(True, None, 8, 4, 2.5))
            for n in (64, 4096)
        },
        "experts in groups of 20": lambda: choice(4096, 160, Choice(False, None, 8, 3, 16.0)),
        "experts by sigmoids": lambda: choice(4096, 384, Choice(True, scale=2.827)),
        "prefix 64": lambda: prefix(cascade.PrefixConfig()),
        "prefix 64, fp8": lambda: prefix(cascade.PrefixConfig(), torch.float8_e4m3fn),
        "prefix 128": lambda: prefix(cascade.PrefixConfig(128, 128, 8)),
        "moe 1": lambda: experts(1),
        "moe 32": lambda: experts(32),
        "moe 256": lambda: experts(256),
        "moe 512": lambda: experts(512),
        "moe 4096": lambda: experts(4096),
        "moe 4096 tall": lambda: experts(4096, MoeConfig(False, 192, tall, tall._replace(block_n=256))),
        "moe 4096 tma": lambda: experts(4096, MoeConfig(False, 128, wide, wide._replace(block_n=256))),
        **{f"moe gpt-oss {n}": partial(experts, n, of=GPT_OSS, clamped=CLAMPED) for n in (1, 32, 256, 512)},
        **{
            f"moe mxfp4 {n}": partial(experts, n, of=GPT_OSS, clamped=CLAMPED, packed="mxfp4")
            for n in (1, 128, 256, 4096)
        },
        **{f"moe int4 {n}": partial(experts, n, packed="int4") for n in (1, 32, 256, 512, 4096)},
        "moe int4 by 32": lambda: experts(256, packed="int4", group=32, of=MoeSize(64, 384)),
        "moe int4 lora": lambda: experts(256, packed="int4", rank=16),
        "moe gpt-oss 4096": lambda: experts(
            4096, MoeConfig(False, 192, tall, tall._replace(block_n=256)), of=GPT_OSS, clamped=CLAMPED
        ),
        **{f"moe lora {n}": partial(experts, n, rank=16) for n in (1, 32, 256)},
        "moe lora 4096": lambda: experts(
            4096, MoeConfig(False, 192, tall, tall._replace(block_n=256)), rank=16
        ),
        "moe lora 1 step": lambda: experts(128, rank=32, of=MoeSize(8, 64, 128, 2)),
        **{
            f"moe {kind} {n}": partial(experts, n, held=held)
            for kind, held in EIGHT_BITS.items()
            for n in (1, 32, 256, 512, 2048, 4096)
        },
        "moe 4096 swap": lambda: experts(4096, MoeConfig(False, 128, swapped, swapped)),
        **step_cases(pdl),
    }


_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ +)?([A-Z]\w*)(\S*) +(.*?);")
_UNIFORM = re.compile(r"\bUR\d+\b")


def unwritten_registers(sass: str) -> list[str]:
    """Uniform registers that an instruction on uniform registers reads and none before it writes: ptxas has
    made such code, which gave a product a wild address."""
    written: set[str] = set()
    read: dict[str, None] = {}
    for operation, kind, operands in _INSTRUCTION.findall(sass):
        into, _, sources = operands.partition(",")
        if not operation.startswith("U"):
            # Moves and reductions to a uniform register name it alone; what else names one reads it.
            written |= set(_UNIFORM.findall(operands)) if "UR" in operation or "REDUX" in operation else set()
            continue
        read |= dict.fromkeys(each for each in _UNIFORM.findall(sources) if each not in written)
        own = _UNIFORM.findall(into)
        wide = 4 if "128" in kind else 2 if "64" in kind or "WIDE" in kind else 1
        written |= {f"UR{int(each[2:]) + more}" for each in own for more in range(wide)}
    return list(read)


def report(name: str, kernel: Any) -> str:
    """One line about a compiled kernel, from its SASS."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, sass = (
            subprocess.run([tools / "cuobjdump", *what, file.name], capture_output=True, text=True).stdout
            for what in (["-res-usage"], ["-sass"])
        )
    found = {key: int(m[1]) if (m := re.search(rf"{key}:(\d+)", usage)) else -1 for key in ("REG", "STACK")}
    instructions = {
        op: len(re.findall(rf"\b{op}\b", sass))
        for op in ("HGMMA", "QGMMA", "IGMMA", "HMMA", "IMMA", "LDL", "UTMALDG")
    }
    counts = " ".join(f"{op} {n}" for op, n in instructions.items() if n)
    if unwritten := unwritten_registers(sass):
        counts += f" READ, NOT WRITTEN: {' '.join(unwritten)}"
    return (
        f"{name:16} {kernel.metadata.name:14} warps {kernel.metadata.num_warps} REG {found['REG']:3} "
        f"STACK {found['STACK']:4} shared {kernel.metadata.shared:6} {counts}"
    )


@contextmanager
def compiling() -> Iterator[list[Any]]:
    """A context in which every launch compiles for sm_90 into Triton's cache and does not run; yields the
    list of compiled kernels."""
    found: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(run(self, *args, **kwargs | {"warmup": True}))

    driver.set_active(_Device())  # permanently: without a GPU there is no driver to restore
    with mock.patch.object(JITFunction, "run", compile_only):
        yield found


def main(argv: list[str] | None = None) -> int:
    """Compile the cases whose names begin with one of the arguments; without arguments, all."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--pdl", action="store_true")
    args = parser.parse_args(argv)
    print(f"Triton {triton.__version__}")
    with compiling() as found:
        for name, case in _cases(args.pdl).items():
            if args.names and not any(name.startswith(prefix) for prefix in args.names):
                continue
            found.clear()
            case()
            for kernel in found:
                print(report(name, kernel), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
