"""Products and experts in FP8 beside bfloat16: `python -m bench.kernels.fp8`.

Written to bench/results/fp8.json: microseconds of Qwen3-8B's four products and of Qwen3-30B-A3B's experts, in
bfloat16, scaled by rows and by blocks, what quantises the rows included; over several matrices, together past
the L2 cache. `--cuts NAME` times ways to cut a product by blocks instead, without keeping them.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.kernels.inputs import LINEARS, MoeSize, moe_weights
from bench.kernels.timing import microseconds
from bench.results import keep
from core.models import Fp8
from core.models.quant import BLOCK
from gpu.device import HOPPER
from gpu.kernels.linear_block import BlockLinear, block_linear, block_linear_config
from gpu.kernels.moe import fused_moe
from gpu.kernels.quant import quantise_rows
from gpu.kernels.tuned import MoeConfigs, MoeShape, weight_name
from gpu.ops.fused import library_product, scaled_product
from gpu.quant import quantise, quantise_blocks

ROWS = (1, 8, 32, 128, 512, 4096)

KINDS: tuple[Fp8, ...] = ("", "rows", "blocks")

CUTS = {
    64: [
        BlockLinear(0, width, True, warps, stages)
        for width, warps, stages in ((64, 4, 4), (64, 4, 8), (128, 4, 4), (128, 4, 6), (128, 8, 6))
    ],
    1 << 20: [
        BlockLinear(height, width, False, warps, stages)
        for height, width, warps, stages in (
            (64, 64, 4, 4),
            (64, 128, 4, 3),
            (64, 128, 4, 5),
            (128, 64, 4, 4),
            (128, 128, 4, 4),
            (128, 128, 8, 3),
            (128, 128, 8, 5),
        )
    ],
}
"""By the most rows they are for; height 0: that of the rule."""


class Matrix(NamedTuple):
    """A product's weight and its scales, if it has any."""

    weight: Tensor
    scale: Tensor | None


def multiply(x: Tensor, matrix: Matrix, cut: BlockLinear, pdl: bool) -> Tensor:
    """The product, its rows quantised first where the weight is; `cut` is for blocks."""
    weight, scale = matrix
    if scale is None:
        return library_product(x, weight, None)
    if scale.dim() == 1:
        return scaled_product(*quantise_rows(x, pdl=pdl), weight, scale, None, x.dtype)
    numbers, rows = quantise_rows(x, group=BLOCK, pdl=pdl)
    return block_linear(numbers, rows, weight, scale, None, x.dtype, cut, pdl=pdl)


def matrices(name: str, kind: Fp8) -> list[Matrix]:
    """As many of one of LINEARS as pass the L2 cache."""
    outputs, inputs, _ = LINEARS[name]
    weight = torch.randn(outputs, inputs, device="cuda") * inputs**-0.5
    copies = range(max(2, int(300e6 / weight.numel())))
    if not kind:
        return [Matrix(weight.to(torch.bfloat16, copy=True), None) for _ in copies]
    numbers, scale = (quantise if kind == "rows" else quantise_blocks)(weight)
    return [Matrix(numbers.clone(), scale.clone()) for _ in copies]


def products(name: str, pdl: bool) -> dict[str, dict[str, float]]:
    """By rows, then kind, microseconds."""
    found: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        made = matrices(name, kind)
        outputs, inputs = made[0].weight.shape
        for n in ROWS:
            x = torch.randn(n, inputs, device="cuda").bfloat16()
            config = block_linear_config(n, outputs)
            calls = [partial(multiply, x, each, config, pdl) for each in made]
            us = microseconds(calls, replays=5)
            found.setdefault(str(n), {})[kind or "bfloat16"] = round(us, 1)
    return found


def experts(pdl: bool) -> dict[str, dict[str, float]]:
    """The same for a layer of experts."""
    size, device = MoeSize(), torch.device("cuda")
    found: dict[str, dict[str, float]] = {}
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
            run = partial(
                fused_moe, weights=(a, b), top_k=size.top_k, config=configs.at(n), scales=scales, pdl=pdl
            )
            x = torch.randn(n, size.hidden, device=device).bfloat16()
            calls = [partial(run, x, torch.randn(n, size.experts, device=device)) for _ in range(4)]
            us = microseconds(calls, replays=7)
            found.setdefault(str(n), {})[kind or "bfloat16"] = round(us, 1)
    return found


def cuts(name: str, pdl: bool) -> None:
    """Print what each way to cut a product takes."""
    made = matrices(name, "blocks")
    for n in ROWS:
        x = torch.randn(n, made[0].weight.shape[1], device="cuda").bfloat16()
        rule = block_linear_config(n, len(made[0].weight))
        others = next(every for most, every in sorted(CUTS.items()) if n <= most)
        for config in (rule, *(each._replace(block_m=each.block_m or rule.block_m) for each in others)):
            calls = [partial(multiply, x, each, config, pdl) for each in made]
            print(f"{name:14} {n:5} {microseconds(calls, replays=5):8.1f} us  {tuple(config)}", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Print and keep."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--name", default="fp8")
    parser.add_argument("--cuts", choices=LINEARS, help="a product, whose ways to be cut are timed")
    asked = parser.parse_args(argv)
    pdl = torch.cuda.get_device_capability() == HOPPER
    if asked.cuts:
        cuts(asked.cuts, pdl)
        return 0
    told: dict[str, Any] = {"device": torch.cuda.get_device_name(0), "us": {}}
    for name in [*(name for name in LINEARS if name.startswith("8B")), "30B-A3B experts"]:
        told["us"][name] = products(name, pdl) if name in LINEARS else experts(pdl)
        print(name, told["us"][name], flush=True)
        keep(asked.name, told)
    return 0


if __name__ == "__main__":
    sys.exit(main())
