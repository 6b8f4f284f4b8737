"""Times of an MoE layer and of its two GEMMs: `python -m bench.kernels.experts`.

Written to bench/results/experts.json. Bursts of a few milliseconds with a pause before each show the kernels
at full clock. Steps of thousands of tokens run an H200 at its power limit, a sixth slower; measure these with
`bench.step --only prefill --trace`.

`--group 128` also times weights of 4 bits in such groups, and first compares the layer with one of the
weights that they stand for.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.kernels import reference
from bench.kernels.inputs import MoeSize, distinct_experts, error, moe_after
from bench.kernels.timing import BANDWIDTH, FLOPS, Row, microseconds
from bench.kernels.tune import TOKENS, Bench, describe, row, weight_bytes
from bench.results import save
from gpu.device import HOPPER
from gpu.kernels.gemm.cublaslt import FOLDER
from gpu.kernels.moe.fused import fused_moe
from gpu.kernels.moe.route import route
from gpu.kernels.moe.tuned import MoeConfig, MoeConfigs

LIMIT = 8e-3
"""Limit of an error, relative to the norm, as in `bench.kernels.int4`."""


def off(bench: Bench, x: Tensor, logits: Tensor, use: MoeConfig, pdl: bool) -> float:
    """How far the layer is from one in float32 with the weights that its own stand for."""
    after = moe_after(x)
    fused_moe(x, logits, bench.layer, use, after, pdl=pdl)
    return error(after[0], reference.moe(x, logits, bench.w13, bench.w2, bench.size.top_k))


def times(
    size: MoeSize, tokens: Sequence[int], folder: Path = FOLDER, pause: float = 0.0, group: int = 0
) -> Iterator[Row]:
    """Times of the layer from router logits to the sum, of each GEMM and of both, with the configs of
    `folder` or the rule, over several routings, with `pause` seconds before each; with a `group`, of weights
    of 4 bits. Raises AssertionError where these give something else than they stand for."""
    device = torch.device("cuda")
    hopper = torch.cuda.get_device_capability(device) == HOPPER
    bench = Bench(size, device, group)
    configs = MoeConfigs(bench.shape(), folder, deep=hopper)

    def burst(calls: Sequence[Callable[[], Any]]) -> float:
        torch.cuda.synchronize()
        time.sleep(pause)
        return microseconds(calls, replays=9, least=6)

    for n in tokens:
        # Of 4 bits more routings: the experts of few rows together must exceed the L2 cache.
        steps, use = [each for _ in range(4 if group else 1) for each in bench.inputs(n)], configs.at(n)
        apart = off(bench, *steps[0], use, hopper) if group else 0.0
        assert apart < LIMIT, f"{n} tokens in 4 bits: {apart:.1e} from what they stand for"
        whole = [partial(fused_moe, x, g, bench.layer, use, moe_after(x), pdl=hopper) for x, g in steps]
        line = row(n, size, burst(whole), group=group)
        yield line._replace(target=f"{line.target}  error {apart:.1e}") if group else line
        if use.small:
            continue
        cut = [(x, route(logits, size.top_k, use.block_m)[1]) for x, logits in steps]
        up = [partial(bench.product, x, tiles, use.block_m, use.up, True) for x, tiles in cut]
        low = [partial(bench.product, call(), call.args[1], use.block_m, use.down, False) for call in up]
        moved = distinct_experts(n, size) * size.width * size.hidden * weight_bytes(group)
        flops = 2.0 * n * size.top_k * size.width * size.hidden
        parts = burst(up), burst(low)
        yield Row("  gate_up", line.case, parts[0], 2 * moved, 2 * flops, describe(use))
        yield Row("  down", line.case, parts[1], moved, flops)
        yield Row("  both", line.case, sum(parts), 3 * moved, 3 * flops)


def main(argv: list[str] | None = None) -> int:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--width", type=int, default=768, help="an expert's intermediate size on a rank")
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--group", type=int, default=0, help="also weights of 4 bits, by so many inputs")
    parser.add_argument("--name", default="experts")
    args = parser.parse_args(argv)
    found: dict[str, dict[str, float]] = {}
    size, name = MoeSize(width=args.width), torch.cuda.get_device_name(0)
    for group, line in (
        (each, line)
        for each in dict.fromkeys((0, args.group))
        for line in times(size, args.tokens, pause=1.0, group=each)
    ):
        print(line.line(), "in 4 bits" * (group > 0), flush=True)
        figures = {"us": line.us, "of_bandwidth": line.bytes / BANDWIDTH * 1e6 / line.us}
        figures["of_flops"] = line.flops / FLOPS * 1e6 / line.us
        kind = "int4_" * (group > 0)
        part = {f"{kind}{line.name.strip()}_{key}": round(value, 3) for key, value in figures.items()}
        found.setdefault(line.case, {}).update(part)
        save(args.name, {"device": name, "width": args.width, "group": args.group, "tokens": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
