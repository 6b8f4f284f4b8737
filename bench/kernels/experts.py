"""Times of an MoE layer and of its two GEMMs: `python -m bench.kernels.experts`.

Written to bench/results/experts.json. Bursts of a few milliseconds with a pause before each show the kernels
at full clock. Steps of thousands of tokens run an H200 at its power limit, a sixth slower; measure these with
`bench.step --only prefill --trace`.
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

from bench.kernels.inputs import MoeSize, distinct_experts, moe_after
from bench.kernels.timing import BANDWIDTH, FLOPS, Row, microseconds
from bench.kernels.tune import TOKENS, Bench, describe, row
from bench.results import save
from gpu.device import HOPPER
from gpu.experts import Experts
from gpu.kernels.gemm.cublaslt import FOLDER
from gpu.kernels.moe.fused import fused_moe
from gpu.kernels.moe.grouped_gemm import grouped_gemm
from gpu.kernels.moe.route import route
from gpu.kernels.moe.tuned import MoeConfigs, MoeShape


def times(size: MoeSize, tokens: Sequence[int], folder: Path = FOLDER, pause: float = 0.0) -> Iterator[Row]:
    """Times of the layer from router logits to the sum, of each GEMM and of both, with the configs of
    `folder` or the rule, over several routings, with `pause` seconds before each."""
    device = torch.device("cuda")
    hopper = torch.cuda.get_device_capability(device) == HOPPER
    bench, name = Bench(size, device), torch.cuda.get_device_name(0)
    shape = MoeShape(size.experts, size.width, size.hidden, size.top_k, "bfloat16", name)
    configs = MoeConfigs(shape, folder, deep=hopper)

    def burst(calls: Sequence[Callable[[], Any]]) -> float:
        torch.cuda.synchronize()
        time.sleep(pause)
        return microseconds(calls, replays=9, least=6)

    for n in tokens:
        steps, use = bench.inputs(n), configs.at(n)
        layer = Experts(bench.w13, bench.w2, size.top_k)
        whole = [partial(fused_moe, x, g, layer, use, moe_after(x), pdl=hopper) for x, g in steps]
        line = row(n, size, burst(whole))
        yield line
        if use.small:
            continue
        cut = [(x, route(logits, size.top_k, use.block_m)[1]) for x, logits in steps]
        up = [partial(grouped_gemm, x, bench.w13, tiles, use.block_m, use.up, gated=True) for x, tiles in cut]
        low = [partial(grouped_gemm, call(), bench.w2, call.args[2], use.block_m, use.down) for call in up]
        moved = distinct_experts(n, size) * size.width * size.hidden * 2
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
    parser.add_argument("--name", default="experts")
    args = parser.parse_args(argv)
    found: dict[str, dict[str, float]] = {}
    for line in times(MoeSize(width=args.width), args.tokens, pause=1.0):
        print(line.line(), flush=True)
        figures = {"us": line.us, "of_bandwidth": line.bytes / BANDWIDTH * 1e6 / line.us}
        figures["of_flops"] = line.flops / FLOPS * 1e6 / line.us
        part = {f"{line.name.strip()}_{key}": round(value, 3) for key, value in figures.items()}
        found.setdefault(line.case, {}).update(part)
        save(args.name, {"device": torch.cuda.get_device_name(0), "width": args.width, "tokens": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
