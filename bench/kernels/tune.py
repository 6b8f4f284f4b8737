"""Tunes tile sizes of the MoE GEMMs: `python -m bench.kernels.tune --out DIR [--width 384] [--group 128]`.

For every token count, all candidates of both GEMMs are timed separately at each tile height on the same
routing; the height with the smallest sum of the two best wins. Then the whole layer is timed with this
config, with the rule's and with the few-rows path. A pool of processes compiles the variants into Triton's
cache beforehand.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.errors import TritonError

from bench.kernels.compile import compiling
from bench.kernels.inputs import MoeSize, distinct_experts, moe_after, moe_int4, moe_weights
from bench.kernels.timing import Row, microseconds
from gpu.experts import Experts
from gpu.kernels.moe.fused import fused_moe
from gpu.kernels.moe.gemm_config import TileConfig
from gpu.kernels.moe.grouped_gemm import grouped_gemm
from gpu.kernels.moe.grouped_gemm_tma import TALL
from gpu.kernels.moe.route import Tiles, max_blocks, route
from gpu.kernels.moe.tuned import INT4_NAME, MoeConfig, MoeShape, rule

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
SHARED = 227 * 1024
"""Maximum bytes of shared memory per program on Hopper."""

ROUTINGS = 3
"""Different routings per timing; even at one row their experts together exceed the L2 cache."""


class Variant(NamedTuple):
    """One kernel to compile: a GEMM at a tile height."""

    up: bool
    block_m: int
    config: TileConfig


def heights(tokens: int, size: MoeSize, group: int = 0) -> tuple[int, ...]:
    """Tile heights to try, by the average number of rows per expert. Weights in 4 bits have no tall tiles."""
    average, most = tokens * size.top_k / size.experts, 128 if group else TALL
    for limit, found in ((3, (16,)), (10, (16, 32)), (40, (32, 64)), (100, (64, most))):
        if average <= limit:
            return found
    return (most,)


def _fits(variant: Variant, group: int) -> bool:
    config, weights = variant.config, 2 if variant.up else 1
    accumulators = weights * variant.block_m * config.block_n / (32 * config.warps)
    rows, outputs = variant.block_m, weights * config.block_n
    # Of 4 bits a step takes 256 inputs, and keeps words of 64.
    step = 256 * rows + 64 * outputs if group else config.block_k * (rows + outputs)
    return 2 * step * config.stages <= SHARED and accumulators <= 192


def candidates(up: bool, block_m: int, quick: bool, group: int = 0) -> Iterator[Variant]:
    """Tile configs of one GEMM at a tile height. Low tiles stream weights; tall ones are for wgmma.

    Left out, because slower on an H200: activations as the left operand in low tiles; and tiles of 128 rows,
    which took 6 to 19% longer than tall ones from 2,048 tokens on.
    """
    rest: Iterable[tuple[Any, ...]]
    if group:
        low, wide = block_m <= 32, ((64, 4), (128, 4), (128, 8))
        flags = ((True, False),) if low else ((True, False), (True, True), (False, False))
        shapes = product((((32, 2), *wide) if low else wide), (2, 3, 4), flags)
        rest = ((n, 64, warps, stages, *more, False) for (n, warps), stages, more in shapes)
    elif block_m <= 32:
        rest = product((64, 128), (64, 128), (4,), (3, 4), (True,), (False,), (False, True))
    elif block_m < TALL:
        rest = product((64, 128), (64,), (4, 8), (3, 4), (True,), (False, True), (False, True))
    else:
        rest = product((64, 128) if up else (128, 256), (64,), (8,), (3, 4, 5), (False,), (False,), (True,))
    every = [TileConfig(*more) for more in rest]
    if quick:
        every = every[::3]
    yield from (v for config in every if _fits(v := Variant(up, block_m, config), group))


class Bench:
    """Weights and inputs of one shape on the GPU. With a `group` `layer` has the weights in 4 bits, and what
    they stand for is `w13` and `w2`."""

    def __init__(self, size: MoeSize, device: torch.device, group: int = 0) -> None:
        self.size = size
        self.device = device
        self.group = group
        self.w13, self.w2 = moe_weights(size, torch.bfloat16, device)
        self.layer = Experts(self.w13, self.w2, size.top_k)
        if group:
            (n13, s13, self.w13), (n2, s2, self.w2) = (
                moe_int4(each, group, torch.bfloat16) for each in (self.w13, self.w2)
            )
            self.layer = Experts(n13, n2, size.top_k, scales=(s13, s2))

    def shape(self) -> MoeShape:
        """The shape and dtype that the configs depend on."""
        kind, size = INT4_NAME if self.group else "bfloat16", self.size
        name = torch.cuda.get_device_name(0)
        return MoeShape(size.experts, size.width, size.hidden, size.top_k, kind, name)

    def product(self, rows: Tensor, tiles: Tiles, block_m: int, config: TileConfig, up: bool) -> Tensor:
        """The layer's first or second GEMM of `rows`."""
        layer = self.layer
        w, packed = layer.w13 if up else layer.w2, layer.scales[not up] if layer.scales else None
        return grouped_gemm(rows, w, tiles, block_m, config, gated=up, packed=packed)

    def inputs(self, tokens: int) -> list[tuple[Tensor, Tensor]]:
        """Activations and router logits of several steps."""
        return [
            (
                torch.randn(tokens, self.size.hidden, device=self.device).bfloat16(),
                torch.randn(tokens, self.size.experts, device=self.device),
            )
            for _ in range(ROUTINGS)
        ]

    def gemm(self, variant: Variant, steps: list[tuple[Tensor, Tensor]]) -> float:
        """µs of one GEMM; infinite if it fails to compile."""
        cut = [route(logits, self.size.top_k, variant.block_m)[1] for _, logits in steps]
        hidden = torch.randn(len(cut[0].pairs), self.size.width, device=self.device).bfloat16()

        def call(x: Tensor, tiles: Tiles) -> Any:
            rows = x if variant.up else hidden
            return self.product(rows, tiles, variant.block_m, variant.config, variant.up)

        calls = [partial(call, x, t) for (x, _), t in zip(steps, cut, strict=True)]
        try:
            return microseconds(calls, replays=7, least=6)
        except (TritonError, RuntimeError) as failure:
            torch.cuda.synchronize()  # raises again if the error is of the device, not of the compiler
            print(f"dropped {variant}: {str(failure)[:80]}", flush=True)
            return float("inf")

    def whole(self, config: MoeConfig, steps: list[tuple[Tensor, Tensor]]) -> float:
        """µs of the expert MLP from logits to sum."""
        calls = [partial(fused_moe, x, g, self.layer, config, moe_after(x)) for x, g in steps]
        return microseconds(calls)


def compile_variant(size: MoeSize, variant: Variant, group: int = 0) -> None:
    """Compile one variant into Triton's cache, in a process of the pool."""
    tokens, k = 16, size.top_k
    total = max_blocks(tokens, size.experts, k, variant.block_m)
    tiles = Tiles(torch.empty(tokens * k, dtype=torch.int32), torch.empty(4, total, dtype=torch.int32))
    up, (block_m, config) = variant.up, variant[1:]
    outputs, inputs = (2 * size.width, size.hidden) if up else (size.hidden, size.width)
    w, packed = torch.empty(size.experts, outputs, inputs, dtype=torch.bfloat16), None
    if group:
        w = torch.empty(size.experts, outputs, inputs // 4, dtype=torch.int16)
        packed = torch.empty(size.experts, inputs // group, outputs, 2, dtype=torch.bfloat16)
    rows = torch.empty(tokens if up else tokens * k, inputs, dtype=torch.bfloat16)
    with compiling():
        grouped_gemm(rows, w, tiles, block_m, config, gated=up, packed=packed)


def variants(
    width: int, tokens: Sequence[int], quick: bool, group: int = 0
) -> list[tuple[MoeSize, Variant, int]]:
    """Arguments of `compile_variant` for all variants of one width."""
    size = MoeSize(width=width)
    tall = {(up, m) for n in tokens for m in heights(n, size, group) for up in (True, False)}
    return [(size, v, group) for up, m in sorted(tall) for v in candidates(up, m, quick, group)]


def compile_all(tasks: Sequence[partial[None]], seconds: float = 180.0) -> None:
    """Run the tasks in a pool of processes, for at most `seconds`. Missing variants are compiled when they
    are timed; those that fail to compile fail there again and are dropped."""
    began = time.monotonic()
    context = multiprocessing.get_context("spawn")
    workers = max(len(os.sched_getaffinity(0)) - 1, 1)
    with ProcessPoolExecutor(workers, context) as pool:
        found = wait([pool.submit(task) for task in tasks], timeout=seconds)
        pool.shutdown(cancel_futures=True)
    failed = [task for task in found.done if not task.cancelled() and task.exception()]
    print(
        f"compiled {len(found.done) - len(failed)} of {len(tasks)} in {time.monotonic() - began:.0f} s",
        *(f"failed: {str(task.exception())[-200:]}" for task in failed[:3]),
        sep="\n",
        flush=True,
    )


def search(bench: Bench, tokens: int, rule_config: MoeConfig, quick: bool) -> tuple[MoeConfig, float, float]:
    """The best config for a token count, the µs of the layer with it, and the µs with the rule's config. The
    rule's config wins if the whole layer is faster with it: the search timed the GEMMs separately."""
    steps = bench.inputs(tokens)
    best: tuple[float, MoeConfig] | None = None
    for block_m in heights(tokens, bench.size, bench.group):
        timed = [
            min((bench.gemm(v, steps), v) for v in candidates(up, block_m, quick, bench.group))
            for up in (True, False)
        ]
        config = MoeConfig(False, block_m, timed[0][1].config, timed[1][1].config)
        if best is None or timed[0][0] + timed[1][0] < best[0]:
            best = timed[0][0] + timed[1][0], config
    assert best is not None
    plain = bench.whole(rule_config, steps)
    found = [(plain, rule_config), (bench.whole(best[1], steps), best[1])]
    if tokens <= 8:
        small = best[1]._replace(small=True)
        found.append((bench.whole(small, steps), small))
    spent, config = min(found)
    return config, spent, plain


def weight_bytes(group: int) -> float:
    """Bytes of a weight: of 4 bits in a `group` that has a scale and a zero point, or of bfloat16."""
    return 0.5 + 4 / group if group else 2.0


def row(tokens: int, size: MoeSize, us: float, name: str = "fused_moe_add_norm", group: int = 0) -> Row:
    """A line of the table, with the bytes of the distinct experts and activations, and the FLOPs."""
    expert = 3 * size.hidden * size.width
    moved = distinct_experts(tokens, size) * expert * weight_bytes(group) + 4 * tokens * size.hidden
    flops = 2.0 * tokens * size.top_k * expert
    target = ""
    if 32 <= tokens <= 512:
        target = f"{us / (1e6 * moved / 4.3e12):.2f}x of bandwidth time (goal 1.15)"
    elif tokens >= 4096:
        target = f"{flops / us / 1e6 / 790:.1%} of 790 TFLOP/s (goal 65%)"
    return Row(name, f"T {tokens} E {size.experts} N {size.width}", us, moved, flops, target)


def tune(
    width: int, tokens: Sequence[int], out: Path, seconds: float, quick: bool, group: int = 0
) -> tuple[dict[int, MoeConfig], list[Row]]:
    """Tune for at most `seconds`, write the file after every token count, return configs and lines."""
    size, began = MoeSize(width=width), time.monotonic()
    bench = Bench(size, torch.device("cuda"), group)
    shape = bench.shape()
    found: dict[int, MoeConfig] = {}
    rows: list[Row] = []
    for n in tokens:
        if time.monotonic() - began > seconds:
            print(f"tune N {width}: out of time before {n} tokens", flush=True)
            break
        config, us, plain = search(bench, n, rule(shape, n, deep=True), quick)
        found[n] = config
        rows.append(row(n, size, us, group=group))
        print(f"{rows[-1].line()}  rule {plain:.1f} us  {describe(config)}", flush=True)
        write(out / shape.file, found)
    return found, rows


def describe(config: MoeConfig) -> str:
    """A config on one line."""
    if config.small:
        return "small"
    sides = (
        f"{c.block_n}x{c.block_k} w{c.warps} s{c.stages}"
        + " swap" * c.swap
        + " half" * c.half
        + " tma" * c.tma
        for c in (config.up, config.down)
    )
    return f"m{config.block_m} up " + " down ".join(sides)


def write(path: Path, found: dict[int, MoeConfig]) -> None:
    """Write one entry per line, for small diffs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = {
        n: {"small": c.small, "block_m": c.block_m, "up": c.up._asdict(), "down": c.down._asdict()}
        for n, c in sorted(found.items())
    }
    lines = ",\n".join(f'  "{n}": {json.dumps(entry)}' for n, entry in entries.items())
    path.write_text(f"{{\n{lines}\n}}\n")


def main(argv: list[str] | None = None) -> int:
    """Tune one expert width."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--width", type=int, default=768, help="an expert's intermediate size on a rank")
    parser.add_argument("--out", type=Path, default=Path("configs/kernels"))
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--quick", action="store_true", help="a third of the candidates")
    parser.add_argument("--group", type=int, default=0, help="weights of 4 bits, by so many inputs")
    args = parser.parse_args(argv)
    tasks = variants(args.width, args.tokens, args.quick, args.group)
    compile_all([partial(compile_variant, *task) for task in tasks])
    tune(args.width, args.tokens, args.out, args.seconds, args.quick, args.group)
    return 0


if __name__ == "__main__":
    sys.exit(main())
