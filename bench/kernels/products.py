"""cuBLASLt's algorithms for products of many rows, under load: `python -m bench.kernels.products --out FILE`.

At thousands of rows a device is at its power limit, so a burst says little: every variant runs for a part
of a second at a time, in turn with the others and with cuBLAS's own choice, three times over; the sum of
the last two decides. What beats cuBLAS by 0.5% is written as `gpu.kernels.cublas` reads it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from bench.kernels.inputs import LINEARS
from bench.kernels.timing import capture
from gpu.kernels.cublas import Choice, Product, Products

CLUSTERS = (3, 5)
"""2x1 and 1x2; those of four programs were never the best."""

ROUNDS, KEPT = 3, 6

CALLS = 8
"""Products in a graph."""

LARGE = 1 << 23
"""Elements of a weight worth a choice."""


class Variant(NamedTuple):
    """`choice` None: cuBLAS's own. `seconds` a call, by round."""

    choice: Choice | None
    replay: Callable[[], object]
    seconds: list[float]


def timed(replay: Callable[[], object], times: int) -> float:
    """Seconds of so many replays in a row."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(times):
        replay()
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def choose(product: Product, x: torch.Tensor, weight: torch.Tensor, seconds: float) -> list[Variant]:
    """Variants, the best under load first."""
    tiles = {product.tile(algorithm) for algorithm in product.proposed()}
    variants = [Variant(None, capture([partial(F.linear, x, weight)] * CALLS).graph.replay, [])]
    for choice in (Choice(tile, c, s) for tile in sorted(tiles) for c in CLUSTERS for s in (0, 1)):
        if (algorithm := product.algorithm(choice)) is not None:
            call = partial(product.run, x, weight, algorithm)
            variants.append(Variant(choice, capture([call] * CALLS).graph.replay, []))
    bursts = {id(v): min(timed(v.replay, 1) for _ in range(3)) for v in variants}
    kept = variants[:1] + sorted(variants[1:], key=lambda v: bursts[id(v)])[:KEPT]
    for turn in range(ROUNDS):
        for variant in kept if turn % 2 else reversed(kept):
            times = max(int(seconds / bursts[id(variant)]), 1)
            variant.seconds.append(timed(variant.replay, times) / times / CALLS)
    return sorted(kept, key=lambda v: sum(v.seconds[1:]))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=0.25, help="of a variant at a time")
    parser.add_argument("--out", type=Path, required=True, help="file for configs/kernels")
    args = parser.parse_args()
    device = torch.device("cuda")
    many = Products({}, device)
    found: dict[str, dict[str, int]] = {}
    for name, (outputs, inputs, _) in LINEARS.items():
        if outputs * inputs < LARGE:
            continue
        x = torch.randn(args.rows, inputs, device=device).bfloat16()
        weight = (torch.randn(outputs, inputs, device=device) * 0.02).bfloat16()
        ranked = choose(many.product(args.rows, outputs, inputs), x, weight, args.seconds)
        for variant in ranked:
            print(name, variant.choice, [round(1e6 * s, 1) for s in variant.seconds], "us", flush=True)
        own = next(v for v in ranked if v.choice is None)
        best = ranked[0]
        if best.choice is not None and sum(best.seconds[1:]) < 0.995 * sum(own.seconds[1:]):
            found[f"{outputs}x{inputs}"] = best.choice._asdict()
    args.out.write_text(json.dumps(found, indent=2) + "\n")
    print(args.out.read_text())


if __name__ == "__main__":
    main()
