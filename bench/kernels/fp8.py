"""Times of GEMMs and MoE layers in FP8 and bfloat16: `python -m bench.kernels.fp8`.

Written to bench/results/fp8.json: microseconds of Qwen3-8B's four GEMMs and of Qwen3-30B-A3B's MoE layer, in
bfloat16 and in FP8 with scales by rows and by blocks, including the quantisation of activations; over several
matrices that together exceed the L2 cache. `share` is the share of the peak: the time to read the weights or,
at many rows, the time of the FLOPs at twice bfloat16's rate. gate_up and MoE include SiLU. `--cuts NAME`
times tile configs of one GEMM instead and only prints them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from bench.kernels import tune
from bench.kernels.compile import compiling
from bench.kernels.inputs import LINEARS, MoeSize, moe_after, moe_weights
from bench.kernels.timing import BANDWIDTH, FLOPS, microseconds
from bench.results import save
from core.models import Fp8
from core.models.quant import BLOCK
from gpu.device import HOPPER
from gpu.experts import Experts
from gpu.kernels.gemm.quant import quantise_rows
from gpu.kernels.gemm.scaled import ScaledGemmConfig, scaled_gemm, scaled_gemm_config
from gpu.kernels.gemm.skinny import Scales, SkinnyConfig, skinny_gemm, skinny_scaled_config, split_k_counters
from gpu.kernels.moe.fused import fused_moe
from gpu.kernels.moe.tuned import MoeConfigs, MoeShape, weight_name
from gpu.kernels.silu_mul import silu_mul
from gpu.ops.base import Matrix
from gpu.ops.fused import cublas_gemm
from gpu.ops.scaled import scaled_linear
from gpu.quant.scaled import FP8, quantise, quantise_blocks, scale_shape

ROWS = (1, 8, 32, 64, 128, 512, 4096)

KINDS: tuple[Fp8, ...] = ("", "rows", "blocks")

BLOCK_CUTS = [
    ScaledGemmConfig(64, 64, 4, 4), ScaledGemmConfig(64, 128, 4, 3), ScaledGemmConfig(64, 128, 4, 5),
    ScaledGemmConfig(128, 64, 4, 4), ScaledGemmConfig(128, 128, 4, 4), ScaledGemmConfig(128, 128, 8, 3),
    ScaledGemmConfig(128, 128, 8, 4), ScaledGemmConfig(128, 128, 8, 5),
]  # fmt: skip

MID_CUTS = [
    SkinnyConfig(block_n, block_k, 1, 4 * block_n // 64, stages)
    for block_n, block_k, stages in (
        (64, 128, 4), (64, 128, 8), (64, 128, 12), (64, 256, 4), (64, 256, 6), (128, 128, 4), (128, 128, 6),
        (128, 256, 3),
    )
]  # fmt: skip
"""Configs to try. Without a gate each also with split-K 2 and 4; only those with block_k 128 support scales
by blocks."""


def multiply(x: Tensor, matrix: Matrix, counters: Tensor, gated: bool, pdl: bool) -> Tensor:
    """The product as a step has it, its rows quantised first where the weight is."""
    if matrix.scale is not None:
        return scaled_linear(x, matrix, counters, gated=gated, pdl=pdl)
    out = cublas_gemm(x, matrix.weight, None)
    return silu_mul(out, pdl=pdl) if gated else out


def matrices(name: str, kind: Fp8) -> list[Matrix]:
    """Copies of one of LINEARS that together exceed the L2 cache."""
    outputs, inputs, _ = LINEARS[name]
    weight = torch.randn(outputs, inputs, device="cuda") * inputs**-0.5
    copies = range(max(2, int(300e6 / weight.numel())))
    if not kind:
        return [Matrix(weight.to(torch.bfloat16, copy=True)) for _ in copies]
    numbers, scale = (quantise if kind == "rows" else quantise_blocks)(weight)
    return [Matrix(numbers.clone(), scale=scale.clone()) for _ in copies]


def share(us: float, weights: float, flops: float, kind: Fp8) -> float:
    """Share of the peak; `weights` is the number of weights that are read."""
    moved = weights * (1 if kind else 2)
    return round(1e6 * max(moved / BANDWIDTH, flops / (FLOPS * (2 if kind else 1))) / us, 3)


Found = dict[str, dict[str, float]]
"""Figures by number of rows, then by kind."""


def products(name: str, pdl: bool) -> tuple[Found, Found]:
    """Microseconds and shares of the peak."""
    took: Found = {}
    shares: Found = {}
    outputs, inputs, gated = LINEARS[name]
    for kind in KINDS:
        made, counters = matrices(name, kind), split_k_counters(torch.device("cuda"))
        for n in ROWS:
            x = torch.randn(n, inputs, device="cuda").bfloat16()
            us = microseconds([partial(multiply, x, each, counters, gated, pdl) for each in made], replays=5)
            label = kind or "bfloat16"
            took.setdefault(str(n), {})[label] = round(us, 1)
            size = outputs * inputs
            shares.setdefault(str(n), {})[label] = share(us, size, 2.0 * n * size, kind)
    return took, shares


def experts(pdl: bool) -> tuple[Found, Found]:
    """Microseconds and shares of the peak of an MoE layer with random routing: at few rows only some experts
    are read."""
    size, device = MoeSize(), torch.device("cuda")
    took: Found = {}
    shares: Found = {}
    each = 3.0 * size.width * size.hidden
    w13, w2 = moe_weights(size, torch.bfloat16, device)
    for kind in KINDS:
        how = quantise if kind == "rows" else quantise_blocks
        (a, s13), (b, s2) = (how(w13), how(w2)) if kind else ((w13, w13), (w2, w2))
        name = weight_name(kind, "bfloat16")
        shape = MoeShape(
            size.experts, size.width, size.hidden, size.top_k, name, torch.cuda.get_device_name(0)
        )
        configs = MoeConfigs(shape, deep=pdl)
        scales = (s13, s2) if kind else None
        for n in ROWS:
            x = torch.randn(n, size.hidden, device=device).bfloat16()
            run = partial(
                fused_moe,
                experts=Experts(a, b, size.top_k, scales=scales),
                config=configs.at(n),
                pdl=pdl,
                after=moe_after(x),
            )
            calls = [partial(run, x, torch.randn(n, size.experts, device=device)) for _ in range(4)]
            us = microseconds(calls, replays=7)
            label = kind or "bfloat16"
            took.setdefault(str(n), {})[label] = round(us, 1)
            hit = size.experts * (1 - (1 - size.top_k / size.experts) ** n)
            shares.setdefault(str(n), {})[label] = share(us, hit * each, 2.0 * n * size.top_k * each, kind)
    return took, shares


def tile_configs(name: str, kind: Fp8, n: int, weight: Tensor) -> Iterator[tuple[Any, Callable[..., Tensor]]]:
    """Tile configs for a GEMM of `n` rows, the rule's first, each with a function that runs it."""
    by_block, gated, counters = kind == "blocks", LINEARS[name][2], split_k_counters(weight.device)
    rule = skinny_scaled_config(n, weight, by_block, gated)
    if rule is None:
        for other in (scaled_gemm_config(n, len(weight)), *BLOCK_CUTS) if by_block else ():
            yield other, partial(scaled_gemm, config=other, bias=None, dtype=torch.bfloat16)
        return
    splits = (1,) if gated else (1, 2, 4)
    more = [cut._replace(split=split) for split, cut in product(splits, MID_CUTS)]
    for cut in (rule, *(cut for cut in more if cut.block_k == BLOCK or not by_block)):

        def multiply(
            x: Tensor,
            rows: Tensor,
            w: Tensor,
            scale: Tensor,
            pdl: bool,
            cut: SkinnyConfig = cut,
        ) -> Tensor:
            scales = Scales(rows, scale)
            return skinny_gemm(
                x, w, None, cut, counters, gated=gated, scales=scales, dtype=torch.bfloat16, pdl=pdl
            )

        yield cut, multiply


def compile_config(name: str, kind: Fp8, n: int, at: int, pdl: bool) -> None:
    """Compile one of the configs, in the pool of `tune.compile_all`."""
    outputs, inputs, _ = LINEARS[name]
    weight, x = (torch.empty(rows, inputs, dtype=FP8) for rows in (outputs, n))
    scale = torch.empty(scale_shape(kind, [outputs], inputs) or ())
    rows = torch.empty(n, *scale.shape[1:])
    _, run = list(tile_configs(name, kind, n, weight))[at]
    with compiling():
        run(x, rows, weight, scale, pdl=pdl)


def tasks(name: str, pdl: bool) -> list[partial[None]]:
    """Compile tasks of all configs of a GEMM."""
    weight = torch.empty(LINEARS[name][:2], dtype=FP8)
    return [
        partial(compile_config, name, kind, n, at, pdl)
        for kind, n in product(KINDS[1:], ROWS)
        for at, _ in enumerate(tile_configs(name, kind, n, weight))
    ]


def cuts(name: str, pdl: bool) -> None:
    """Print the time of each tile config of a GEMM, fastest first, without quantisation."""
    tune.compile_all(tasks(name, pdl))
    for kind in KINDS[1:]:
        made = matrices(name, kind)
        for n in ROWS:
            x = torch.randn(n, made[0].weight.shape[1], device="cuda").bfloat16()
            numbers, rows = quantise_rows(x, group=BLOCK if kind == "blocks" else 0)
            found = []
            for at, (cut, run) in enumerate(tile_configs(name, kind, n, made[0].weight)):
                try:
                    us = microseconds([partial(run, numbers, rows, *each, pdl=pdl) for each in made], 5)
                except OutOfResources as error:  # too much shared memory
                    print(f"{name:12} {kind:6} {n:5} {tuple(cut)}: {error}")
                    continue
                found.append((us, "rule" if at == 0 else "", tuple(cut)))
            for us, rule, cut in [each for at, each in enumerate(sorted(found)) if at < 4 or each[1]]:
                print(f"{name:12} {kind:6} {n:5} {us:8.1f} us  {cut} {rule}", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--name", default="fp8")
    parser.add_argument("--cuts", choices=LINEARS, help="GEMM whose tile configs are timed")
    args = parser.parse_args(argv)
    pdl = torch.cuda.get_device_capability() == HOPPER
    if args.cuts:
        cuts(args.cuts, pdl)
        return 0
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(0), "us": {}, "share": {}}
    for name in [*(name for name in LINEARS if name.startswith("8B")), "30B-A3B experts"]:
        results["us"][name], results["share"][name] = products(name, pdl) if name in LINEARS else experts(pdl)
        print(name, results["us"][name], flush=True)
        save(args.name, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
