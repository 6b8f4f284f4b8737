"""Times of GEMMs of 4-bit weights beside bfloat16: `python -m bench.kernels.int4`.

Written to bench/results/int4.json: microseconds of Qwen3-8B's four GEMMs, as a step has them, and the share
of the bandwidth (`gpu.quant.int4`, groups of 128; over several matrices that together exceed the L2 cache).
gate_up includes SiLU. Every product is first compared with that of the weights it stands for. `--cuts` times
other cuts, and weights turned into 16 bits for cuBLAS, instead and only prints them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from itertools import product, starmap
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.errors import OutOfResources

from bench.kernels import tune
from bench.kernels.compile import compiling
from bench.kernels.inputs import LINEARS, error
from bench.kernels.timing import BANDWIDTH, microseconds
from bench.results import save
from gpu.attention.backend import AttentionBackend
from gpu.device import HOPPER
from gpu.kernels.gemm.cublaslt import products
from gpu.kernels.gemm.int4 import Int4Config, int4_config, int4_gemm, int4_restore
from gpu.kernels.gemm.int4_gemv import Int4GemvConfig, int4_gemv, int4_gemv_config
from gpu.kernels.gemm.skinny import PROCESSORS, split_k_counters
from gpu.kernels.silu_mul import silu_mul
from gpu.ops.base import Matrix
from gpu.ops.fused import Kernels, multiply
from gpu.quant.int4 import WORD, pack, quantise, restore, span

ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 2048)

CUT_ROWS = (1, 8, 16, 32, 64, 256)

GROUP = 128

NAMES = [name for name in LINEARS if name.startswith("8B")]

LIMIT = 8e-3
"""Limit of an error, relative to the norm; bfloat16 rounding of results gives 1.7e-3, of weights more."""


def kernels(pdl: bool) -> Kernels:
    """Kernels that products need."""
    device = torch.device("cuda")
    none = cast(AttentionBackend, None)
    chosen = products(torch.cuda.get_device_name(0), device)
    return Kernels(none, (), pdl=pdl, counters=split_k_counters(device), products=chosen)


def matrices(name: str) -> tuple[list[Matrix], list[Matrix]]:
    """Copies of one of LINEARS in 4 bits and of the weights they stand for in bfloat16; those of each kind
    together exceed the L2 cache."""
    outputs, inputs, _ = LINEARS[name]
    numbers, scale = quantise(torch.randn(outputs, inputs, device="cuda") * inputs**-0.5, GROUP)
    words, scale = pack(numbers, span(inputs, GROUP)), scale.bfloat16()
    plain = restore(words, scale).bfloat16()
    size = outputs * inputs
    fine = [Matrix(words.clone(), scale=scale.clone()) for _ in range(max(2, int(6e8 / size)))]
    return fine, [Matrix(plain.clone()) for _ in range(max(2, int(15e7 / size)))]


def moved(name: str) -> float:
    """Bytes of a matrix in 4 bits."""
    outputs, inputs, _ = LINEARS[name]
    return outputs * inputs * (0.5 + 4 / GROUP)


def expected(x: Tensor, plain: Matrix, gated: bool) -> Tensor:
    """The product by `plain` in float32."""
    out = F.linear(x.float(), plain.weight.float())
    if not gated:
        return out
    gate, up = out.chunk(2, dim=1)
    return F.silu(gate) * up


def times(name: str, pdl: bool) -> dict[str, dict[str, float]]:
    """Time in 4 bits and in bfloat16 (us), share of the bandwidth and error, for each number of rows."""
    fine, plain = matrices(name)
    found: dict[str, dict[str, float]] = {}
    use, gated = kernels(pdl), LINEARS[name][2]
    for n in ROWS:
        x = torch.randn(n, LINEARS[name][1], device="cuda").bfloat16()
        off = error(multiply(x, fine[0], use, gated=gated), expected(x, plain[0], gated))
        us, wide = (
            microseconds([partial(multiply, x, each, use, gated=gated) for each in made], replays=7)
            for made in (fine, plain)
        )
        found[str(n)] = {
            "int4": round(us, 1),
            "bfloat16": round(wide, 1),
            "share": round(1e6 * moved(name) / BANDWIDTH / us, 3),
            "error": round(off, 5),
        }
        print(f"{name:12} {n:5} {found[str(n)]} {'' if off < LIMIT else 'WRONG'}", flush=True)
    return found


def cuts(rows: int, words: Tensor, scale: Tensor, gated: bool) -> Iterator[Int4Config | Int4GemvConfig]:
    """The rule's cut for `rows` rows, and others."""
    if (one := int4_gemv_config(rows, words, scale, gated)) is not None:
        yield one
        programs = [each * PROCESSORS for each in (2, 3, 4, 6)]
        yield from starmap(Int4GemvConfig, product((2, 4, 8), (2, 4), (0, *programs)))
    if (rule := int4_config(rows, words, scale, gated)) is not None:
        yield rule
    steps = words.shape[1] // span(words.shape[1] * WORD, GROUP)
    splits = [each for each in (1, 2, 3, 4, 8, 12, 16) if steps % each == 0]
    shapes = [(16, 1), (32, 2)] if rows <= 16 else [(32, 2)]
    shapes += [(64, 4), (128, 8)]
    for (block_n, warps), split, stages in product(shapes, splits, (3, 5, 7)):
        yield Int4Config(block_n, split, warps, stages)


def compile_cut(name: str, rows: int, at: int, pdl: bool) -> None:
    """Compile one of the cuts, in the pool of `tune.compile_all`."""
    outputs, inputs, gated = LINEARS[name]
    words = torch.empty(outputs, inputs // WORD, dtype=torch.int16)
    scale = torch.empty(inputs // GROUP, outputs, 2, dtype=torch.bfloat16)
    x, cut = torch.empty(rows, inputs, dtype=torch.bfloat16), list(cuts(rows, words, scale, gated))[at]
    with compiling():
        run_cut(x, Matrix(words, scale=scale), cut, split_k_counters(x.device), gated, pdl)


def run_cut(
    x: Tensor,
    matrix: Matrix,
    cut: Int4Config | Int4GemvConfig,
    counters: Tensor | None,
    gated: bool,
    pdl: bool,
) -> Tensor:
    """The product by the kernel that the cut is for."""
    weight, bias, scale, _ = matrix
    assert scale is not None
    if isinstance(cut, Int4GemvConfig):
        return int4_gemv(x, weight, scale, bias, cut, gated=gated, pdl=pdl)
    return int4_gemm(x, weight, scale, bias, cut, counters, gated=gated, pdl=pdl)


class Product(NamedTuple):
    """Product of rows `x` with one of LINEARS. `cut` None: weights are turned into 16 bits first."""

    x: Tensor
    gated: bool
    use: Kernels

    def run(self, matrix: Matrix, cut: Int4Config | Int4GemvConfig | None) -> Tensor:
        x, gated, use = self
        if cut is not None:
            return run_cut(x, matrix, cut, use.counters, gated, use.pdl)
        assert matrix.scale is not None
        out = F.linear(x, int4_restore(matrix.weight, matrix.scale, pdl=use.pdl))
        return silu_mul(out, pdl=use.pdl) if gated else out


def time_cuts(name: str, rows: tuple[int, ...], pdl: bool) -> None:
    """Print the time of each cut of a GEMM, fastest first."""
    fine, plain = matrices(name)
    use, gated = kernels(pdl), LINEARS[name][2]
    words, scale = fine[0].weight, cast(Tensor, fine[0].scale)
    counts = {n: len(list(cuts(n, words, scale, gated))) for n in rows}
    tune.compile_all([partial(compile_cut, name, n, at, pdl) for n in rows for at in range(counts[n])])
    for n in rows:
        one = Product(torch.randn(n, LINEARS[name][1], device="cuda").bfloat16(), gated, use)
        want = expected(one.x, plain[0], gated)
        found = []
        for at, cut in enumerate([*cuts(n, words, scale, gated), None]):
            try:
                off = error(one.run(fine[0], cut), want)
                us = microseconds([partial(one.run, each, cut) for each in fine], replays=5)
            except (OutOfResources, AssertionError) as reason:
                print(f"{name:12} {n:5} {cut}: {str(reason)[:60]}")
                continue
            wrong = f"WRONG {off:.1e}" if off >= LIMIT else ""
            found.append((us, tuple(cut) if cut else "in 16 bits", wrong or ("" if at else "rule")))
        for at, (us, text, label) in enumerate(sorted(found, key=lambda each: each[0])):
            if at < 5 or label or text == "in 16 bits":
                share = 1e6 * moved(name) / BANDWIDTH / us
                print(f"{name:12} {n:5} {us:8.1f} us {share:5.0%}  {text} {label}", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--name", default="int4")
    parser.add_argument("--only", choices=NAMES, action="append", help="GEMM to time; default: all")
    parser.add_argument("--cuts", action="store_true", help="time other cuts")
    parser.add_argument("--rows", help="of --cuts, separated by commas")
    args = parser.parse_args(argv)
    pdl = torch.cuda.get_device_capability() == HOPPER
    names = args.only or NAMES
    if args.cuts:
        rows = tuple(map(int, args.rows.split(","))) if args.rows else CUT_ROWS
        for name in names:
            time_cuts(name, rows, pdl)
        return 0
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(0), "group": GROUP, "products": {}}
    for name in names:
        results["products"][name] = times(name, pdl)
        save(args.name, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
