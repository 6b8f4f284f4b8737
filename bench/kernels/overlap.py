"""A chunk and decode rows at once, each on multiprocessors of its own: `python -m bench.kernels.overlap`.

A step of both takes the tensor cores and the memory in turn: its products leave the memory idle, its decode
attention the tensor cores. Here the two are chains of their own, side by side in one graph, on green contexts
that divide the multiprocessors between them; against one chain for both, as a step is now, and against each
chain alone on as many. Qwen3-8B's layers with random weights, more than L2 holds, at the sustained clock.

Bias: no cos and sin, no store of keys, torch's own attention for the chunk; the weights are read twice, as
they would be.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from ctypes import byref, c_int, c_size_t
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels import inputs
from bench.kernels.inputs import Heads, Layout
from bench.results import keep
from gpu.kernels import decode
from gpu.kernels.cublas import Products
from gpu.kernels.gated import silu_mul
from gpu.kernels.norm import add_rms_norm

HEADS = Heads(32, 8, 128)
HIDDEN, WIDTH = 4096, 12_288
LAYERS = 6
PAGE = 16
PROMPT = 1024
"""Tokens of a prompt: a chunk is of whole ones."""

SM_COUNT_TARGET = 15
"""Of cuBLASLt's attributes of a product: the multiprocessors it is cut for."""

Linear = Callable[[Tensor, Tensor], Tensor]
Side = tuple[Any, Callable[[], Tensor]]
"""A stream, and what runs on it."""


class Layer(NamedTuple):
    """Weights [outputs, inputs], and the norm's [HIDDEN]."""

    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    norm: Tensor


class Rows(NamedTuple):
    """Decode rows, their attention cut for some multiprocessors."""

    pages: inputs.Pages
    config: decode.DecodeConfig
    space: decode.Workspace


def layers(device: torch.device, dtype: torch.dtype, size: int = HIDDEN, width: int = WIDTH) -> list[Layer]:
    """Normal weights, so that what comes out is as large as what goes in."""

    def matrix(outputs: int, ins: int) -> Tensor:
        return torch.empty(outputs, ins, dtype=dtype, device=device).normal_(std=ins**-0.5)

    wide = (HEADS.q + 2 * HEADS.kv) * HEADS.dim
    norm = torch.ones(size, dtype=dtype, device=device)
    return [
        Layer(
            matrix(wide, size),
            matrix(size, HEADS.q * HEADS.dim),
            matrix(2 * width, size),
            matrix(size, width),
            norm,
        )
        for _ in range(LAYERS)
    ]


def rows_of(pages: inputs.Pages, processors: int) -> Rows:
    """All rows that have `pages`."""
    count = len(pages.slots)
    config = decode.decode_config(HEADS.dim, HEADS.kv, processors, count, group=HEADS.q // HEADS.kv)
    space = decode.decode_workspace(count, HEADS.q, HEADS.kv, HEADS.dim, config, pages.k.device)
    return Rows(pages, config, space)


def chain(made: Sequence[Layer], x: Tensor, rows: Rows | None, linear: Linear) -> Tensor:
    """All layers of `x` [rows + chunk, HIDDEN], decode rows first, then whole prompts."""
    n, plan, residual = 0, None, x.clone()
    if rows is not None:
        n = len(rows.pages.slots)
        plan = decode.plan_decode(rows.pages.slots, rows.pages.lengths[rows.pages.slots], rows.config)
    for layer in made:
        qkv = linear(x, layer.qkv).view(len(x), -1, HEADS.dim)
        seen = torch.empty(len(x), HEADS.q * HEADS.dim, dtype=x.dtype, device=x.device)
        if rows is not None and plan is not None:
            decode.paged_decode(
                qkv[:n, : HEADS.q],
                (rows.pages.k, rows.pages.v),
                rows.pages.table,
                plan,
                rows.space,
                rows.config,
                page_size=PAGE,
                scale=HEADS.dim**-0.5,
                out=seen[:n],
            )
        if len(x) > n:
            prompts = qkv[n:].view(-1, PROMPT, HEADS.q + 2 * HEADS.kv, HEADS.dim).transpose(1, 2)
            q, k, v = prompts[:, : HEADS.q], prompts[:, HEADS.q : -HEADS.kv], prompts[:, -HEADS.kv :]
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            seen[n:].view(-1, PROMPT, HEADS.q, HEADS.dim).copy_(out.transpose(1, 2))
        x = add_rms_norm(linear(seen, layer.o), residual, layer.norm, 1e-6)
        x = add_rms_norm(linear(silu_mul(linear(x, layer.gate_up)), layer.down), residual, layer.norm, 1e-6)
    return x


def limited(device: torch.device, processors: int) -> Linear:
    """Products cut for so many multiprocessors; a workspace of its own."""
    products, known = Products({}, device), {}

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        sizes = (len(x), *weight.shape)
        if sizes not in known:
            one = products.product(*sizes)
            target = SM_COUNT_TARGET, byref(c_int(processors)), c_size_t(4)
            one._call("MatmulDescSetAttribute", one._operation, *target)
            known[sizes] = one, next(one.proposed())
        product, algorithm = known[sizes]
        return product.run(x, weight, algorithm)

    return linear


def captured(sides: Sequence[Side]) -> torch.cuda.CUDAGraph:
    """Each work on its stream, side by side, in one graph."""
    for stream, work in sides:
        with torch.cuda.stream(stream):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        for stream, work in sides:
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                work()
        for stream, _ in sides:
            main.wait_stream(stream)
    return graph


def sustained(graph: torch.cuda.CUDAGraph, seconds: float) -> float:
    """Microseconds of a layer, in the second half of so long."""
    begun, count = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds / 2:
        graph.replay()
        torch.cuda.synchronize()
    begun = time.perf_counter()
    while time.perf_counter() - begun < seconds / 2:
        for _ in range(4):
            graph.replay()
        count += 4
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) / count / LAYERS * 1e6


def main() -> int:
    """Print and keep bench/results/overlap.json."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--context", type=int, default=1190)
    parser.add_argument("--chunk", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--decode", type=int, nargs="+", default=[32, 40, 48, 56, 64], help="its processors")
    parser.add_argument("--seconds", type=float, default=0.6, help="of each variant")
    asked = parser.parse_args()
    from flashinfer.green_ctx import split_device_green_ctx

    device, dtype, cuda = torch.device("cuda"), torch.bfloat16, cast(Any, torch.cuda)
    all_of = cuda.get_device_properties(device).multi_processor_count
    made = layers(device, dtype)
    kept = inputs.pages([asked.context] * asked.rows, PAGE, HEADS, dtype, device, Layout(2))
    few = torch.randn(asked.rows, HIDDEN, device=device).to(dtype)
    about = {"device": cuda.get_device_name(0), "rows": asked.rows, "context": asked.context}
    found: list[dict[str, Any]] = []

    def tell(chunk: int, variant: str, *sides: Side) -> None:
        us = round(sustained(captured(sides), asked.seconds), 1)
        found.append({"chunk": chunk, "variant": variant, "us_a_layer": us})
        print(f"chunk {chunk:5}  {variant:24} {us:8.1f} us a layer", flush=True)
        keep("overlap", about | {"times": found})

    for chunk in asked.chunk:
        many = torch.randn(chunk, HIDDEN, device=device).to(dtype)
        usual, rows, linear = cuda.Stream(), rows_of(kept, all_of), limited(device, all_of)
        tell(chunk, "one chain", (usual, partial(chain, made, torch.cat([few, many]), rows, linear)))
        tell(chunk, "decode alone", (usual, partial(chain, made, few, rows, linear)))
        tell(chunk, "chunk alone", (usual, partial(chain, made, many, None, linear)))
        for share in asked.decode:
            streams, resources = split_device_green_ctx(device, 1, share)
            n, m = (int(each.sm.smCount) for each in resources)
            left = streams[0], partial(chain, made, few, rows_of(kept, n), limited(device, n))
            right = streams[1], partial(chain, made, many, None, limited(device, m))
            tell(chunk, f"decode alone on {n}", left)
            tell(chunk, f"chunk alone on {m}", right)
            tell(chunk, f"both, on {n} and {m}", left, right)
    return 0


if __name__ == "__main__":
    sys.exit(main())
