"""cuBLASLt's algorithms against cuBLAS's own choice: `python -m bench.kernels.products --out FILE`.

At thousands of rows a device is at its power limit, so a burst says little: every variant runs for a part
of a second at a time, in turn with the others and with cuBLAS's own choice, three times over; the sum of
the last two decides. What beats cuBLAS by 0.5% is written as `gpu.kernels.cublas` reads it.

At the row counts of captured steps up to 512 (`--few`) bursts are what counts, over weights that L2 does not
hold; there it must beat cuBLAS by 3%, twice. FILE keeps what the other search has written.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from bench.kernels.inputs import LINEARS
from bench.kernels.timing import capture, microseconds
from gpu.kernels.cublas import (
    CLUSTER,
    KIND,
    MANY,
    SPLIT,
    SWIZZLE,
    TILE,
    Choice,
    CublasError,
    Product,
    Products,
    sizes_of,
)
from gpu.kernels.linear_mid import MOST_ROWS
from gpu.step.shapes import decode_sizes, mixed_sizes

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
    tiles = {product.read(algorithm, TILE) for algorithm in product.proposed()}
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


FEW = sorted({n for n in decode_sizes(512) + mixed_sizes(512) if n > MOST_ROWS})
"""Row counts of captured steps that `linear_mid` leaves to cuBLAS."""

BEST, GAIN = 6, 0.97
"""Proposals whose other clusters and splits are tried, and what of cuBLAS's own time a choice may take."""


def quickest(product: Product, rows: int, weights: list[torch.Tensor]) -> tuple[float, float, Choice | None]:
    """us by cuBLAS's own choice and by the best other, and which that is; None where it is no better."""
    x = torch.randn(rows, weights[0].shape[1], device=weights[0].device).bfloat16()
    times: dict[Choice, float] = {}

    def own() -> float:
        return microseconds([partial(F.linear, x, weight) for weight in weights], replays=5)

    def other(choice: Choice) -> float:
        if (algorithm := product.algorithm(choice)) is None:
            return float("inf")
        try:
            return microseconds([partial(product.run, x, w, algorithm) for w in weights], replays=5)
        except CublasError:
            return float("inf")

    for found in product.proposed():
        tile, cluster, swizzle, split, kind = (
            product.read(found, attribute) for attribute in (TILE, CLUSTER, SWIZZLE, SPLIT, KIND)
        )
        choice = Choice(tile, cluster, swizzle, split, kind)
        if choice not in times:
            times[choice] = other(choice)
    for base in sorted(times, key=lambda c: times[c])[:BEST]:
        for cluster, split in itertools.product((2, *CLUSTERS), (1, 2, 3, 4)):
            choice = base._replace(cluster=cluster, split=split)
            if choice not in times:
                times[choice] = other(choice)
    best = min(times, key=lambda c: times[c])
    mine, theirs = other(best), own()
    better = mine < GAIN * theirs and other(best) < GAIN * own()
    return theirs, mine, best if better else None


def few(counts: Sequence[int], many: Products, device: torch.device) -> dict[str, dict[str, int]]:
    """Choices for these row counts, by name in the file."""
    found: dict[str, dict[str, int]] = {}
    for name, (outputs, inputs, _) in LINEARS.items():
        if outputs * inputs < LARGE:
            continue
        sets = max(2, min(8, int(150e6 / (outputs * inputs)) + 1))
        weights = [(torch.randn(outputs, inputs, device=device) * 0.02).bfloat16() for _ in range(sets)]
        for rows in counts:
            theirs, mine, choice = quickest(many.product(rows, outputs, inputs), rows, weights)
            print(f"{name} x {rows}: {theirs:.1f} and {mine:.1f} us, {choice}", flush=True)
            if choice is not None:
                found[f"{rows}x{outputs}x{inputs}"] = choice._asdict()
    return found


def write(path: Path, found: dict[str, dict[str, int]], searched: Collection[int]) -> None:
    """One entry a line; those of other row counts stay."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    kept = {name: entry for name, entry in kept.items() if sizes_of(name)[0] not in searched}
    every = kept | found
    lines = (f"  {json.dumps(name)}: {json.dumps(every[name])}" for name in sorted(every, key=sizes_of))
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=0.25, help="of a variant at a time")
    parser.add_argument("--few", type=int, nargs="*", help=f"these row counts instead; none: {FEW}")
    parser.add_argument("--out", type=Path, required=True, help="file for configs/kernels")
    args = parser.parse_args()
    device = torch.device("cuda")
    many = Products({}, device)
    if args.few is not None:
        counts = args.few or FEW
        write(args.out, few(counts, many, device), counts)
        return
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
    write(args.out, found, [MANY])
    print(args.out.read_text())


if __name__ == "__main__":
    main()
