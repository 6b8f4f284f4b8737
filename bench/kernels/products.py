"""Searches cuBLASLt algorithms faster than cuBLAS's default: `python -m bench.kernels.products --out FILE`.

At thousands of rows the device is at its power limit, so bursts are not representative: every variant runs
for a part of a second, interleaved with the others and with cuBLAS's default, three times; the sum of the
last two decides. A variant that is 0.5% faster than cuBLAS is written to FILE, for
`gpu.kernels.gemm.cublaslt`.

At the row counts of captured steps up to 512 (`--few`) bursts are measured, over weights that exceed L2;
there a variant must be 3% faster, twice. All times go to bench/results/; choices in FILE for other row counts
are kept.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from bench.kernels.inputs import LINEARS
from bench.kernels.timing import capture, microseconds
from bench.results import write as write_result
from gpu.kernels.gemm.cublaslt import (
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
from gpu.kernels.gemm.skinny import MOST_ROWS
from gpu.step.shapes import decode_sizes, mixed_sizes

ALONE, CLUSTERS = 2, (3, 5)
"""No cluster, and clusters of 2x1 and 1x2; at thousands of rows clusters of four were never the fastest."""

ROUNDS, KEPT = 3, 6

CALLS = 8
"""GEMMs in a graph."""

LARGE = 1 << 23
"""Minimum elements of a weight to search for."""

WEIGHTS = {name: (n, k) for name, (n, k, _) in LINEARS.items() if n * k >= LARGE}
"""Outputs and inputs of the searched GEMMs."""

Entries = dict[str, dict[str, int]]
"""Format of `gpu.kernels.gemm.cublaslt`: the fields of a choice by the name of its sizes."""


class Variant(NamedTuple):
    """`choice` None: cuBLAS's default. `seconds` per call, by round."""

    choice: Choice | None
    replay: Callable[[], object]
    seconds: list[float]


def timed(replay: Callable[[], object], times: int) -> float:
    """Seconds of `times` replays."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(times):
        replay()
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def choose(product: Product, x: torch.Tensor, weight: torch.Tensor, seconds: float) -> list[Variant]:
    """Variants, the fastest under load first."""
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
"""Row counts of captured steps that `skinny_gemm` leaves to cuBLAS."""

BEST, GAIN = 6, 0.97
"""Proposals whose other clusters and splits are tried, and the maximum ratio to cuBLAS's time."""


def quickest(product: Product, rows: int, weights: list[torch.Tensor]) -> tuple[float, float, Choice | None]:
    """Microseconds of cuBLAS's default and of the best other choice, and that choice; None if it is not
    faster."""
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
        for cluster, split in itertools.product((ALONE, *CLUSTERS), (1, 2, 3, 4)):
            choice = base._replace(cluster=cluster, split=split)
            if choice not in times:
                times[choice] = other(choice)
    best = min(times, key=lambda c: times[c])
    mine, theirs = other(best), own()
    better = mine < GAIN * theirs and other(best) < GAIN * own()
    return theirs, mine, best if better else None


def random_weight(outputs: int, inputs: int, device: torch.device) -> torch.Tensor:
    """A weight as of `--load-format dummy`."""
    return (torch.randn(outputs, inputs, device=device) * 0.02).bfloat16()


def few(counts: Sequence[int], many: Products, device: torch.device) -> tuple[Entries, list[dict[str, Any]]]:
    """Choices for these row counts, and the times of every GEMM."""
    found: Entries = {}
    times: list[dict[str, Any]] = []
    for name, (outputs, inputs) in WEIGHTS.items():
        sets = max(2, min(8, int(150e6 / (outputs * inputs)) + 1))
        weights = [random_weight(outputs, inputs, device) for _ in range(sets)]
        for rows in counts:
            own, best, choice = quickest(many.product(rows, outputs, inputs), rows, weights)
            print(f"{name} x {rows}: {own:.1f} and {best:.1f} us, {choice}", flush=True)
            times.append({"name": name, "rows": rows, "cublas_us": round(own, 1), "best_us": round(best, 1)})
            if choice is not None:
                found[f"{rows}x{outputs}x{inputs}"] = choice._asdict()
    return found, times


def thousands(rows: int, seconds: float, many: Products, device: torch.device) -> Entries:
    """Choices for thousands of rows, measured with `rows`."""
    found: Entries = {}
    for name, (outputs, inputs) in WEIGHTS.items():
        x = torch.randn(rows, inputs, device=device).bfloat16()
        weight = random_weight(outputs, inputs, device)
        ranked = choose(many.product(rows, outputs, inputs), x, weight, seconds)
        for variant in ranked:
            print(name, variant.choice, [round(1e6 * s, 1) for s in variant.seconds], "us", flush=True)
        own = next(v for v in ranked if v.choice is None)
        best = ranked[0]
        if best.choice is not None and sum(best.seconds[1:]) < 0.995 * sum(own.seconds[1:]):
            found[f"{outputs}x{inputs}"] = best.choice._asdict()
    return found


def write(path: Path, found: Entries, searched: Collection[int]) -> None:
    """Write one entry per line; those of other row counts are kept."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    kept = {name: entry for name, entry in kept.items() if sizes_of(name)[0] not in searched}
    every = kept | found
    lines = (f"  {json.dumps(name)}: {json.dumps(every[name])}" for name in sorted(every, key=sizes_of))
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=0.25, help="duration of a variant in each round")
    parser.add_argument(
        "--few", type=int, nargs="*", help=f"search these row counts instead; without values: {FEW}"
    )
    parser.add_argument("--name", default="products", help="result file of --few under bench/results")
    parser.add_argument("--out", type=Path, required=True, help="file for configs/kernels")
    args = parser.parse_args()
    device = torch.device("cuda")
    many = Products({}, device)
    if args.few is None:
        write(args.out, thousands(args.rows, args.seconds, many, device), [MANY])
    else:
        counts = args.few or FEW
        found, times = few(counts, many, device)
        write(args.out, found, counts)
        write_result(args.name, {"device": torch.cuda.get_device_name(0), "times": times})


if __name__ == "__main__":
    main()
