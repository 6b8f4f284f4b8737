"""Cases of `bench.kernels.compile`: products, adapters, norms, and the choice of tokens.

As there: tensors are never read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench.kernels import inputs
from bench.kernels.compile_moe import CPU, DTYPE, EIGHT_BITS
from bench.kernels.inputs import Heads, empty
from bench.kernels.lora_inputs import blank_rows, lora_matrix, slots_view
from core.models.spec import W8A8, Fp8
from gpu.kernels import norm
from gpu.kernels import silu_mul as gated
from gpu.kernels.gemm import gemv, int4, int4_gemv, scaled, skinny
from gpu.kernels.lora import dense
from gpu.kernels.lora.linear import shrink_ahead
from gpu.kernels.lora_rows import lay_out
from gpu.ops.base import Matrix
from gpu.ops.scaled import scaled_linear
from gpu.quant.scaled import FP8, dtype_of, scale_shape


def product_cases(pdl: bool) -> dict[str, Callable[[], Any]]:
    """See `bench.kernels.compile`."""
    heads = Heads()
    n = inputs.scalar(64, CPU)

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

    x = empty(256, 2048)
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
        "lora 1": lambda: lora(1, (4096, 1024, 1024), 4096),
        "lora 32": lambda: lora(32, (12_288, 12_288), 4096),
        "lora 32, split": lambda: lora(32, (4096,), 12_288),
        "lora 2048": lambda: lora(2048, (12_288, 12_288), 4096),
        "lora ends": lambda: lora_ends(256),
        "sample": sampler,
    }
