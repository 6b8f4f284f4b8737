"""Cost of attention between products at few rows: `python -m bench.kernels.one_row`.

Layers of a product of queries, keys and values behind its norm, rope, attention and an output product, which
adds to the residual, run one after the other under programmatic dependent launch, with and without attention.
As in a step they share a plan, a page table and the workspace; weights, keys and values are a layer's own.
Measured alone, a kernel of few microseconds takes longer: no other hides its launch. Written to
bench/results/one-row.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.kernels import inputs
from bench.kernels.inputs import Heads
from bench.kernels.timing import microseconds
from bench.results import save
from gpu.kernels.attention.cluster_decode import ClusterDecode
from gpu.kernels.attention.decode import decode_workspace, paged_decode
from gpu.kernels.attention.decode_config import DecodeConfig, decode_config
from gpu.kernels.attention.decode_plan import plan_decode
from gpu.kernels.attention.pages import Pages
from gpu.kernels.attention.qk_norm_rope_store import norm_rope_store
from gpu.kernels.gemm.gemv import GemvConfig, gemv, gemv_config

PAGE, LAYERS, EPS = 16, 24, 1e-6


class Size(NamedTuple):
    """Sizes of a model's layers."""

    hidden: int
    heads: Heads


MODELS = {
    "Qwen3-8B": Size(4096, Heads(32, 8, 128)),
    "Qwen3-30B-A3B": Size(2048, Heads(32, 4, 128)),
    "Qwen3-30B-A3B, --tp 2": Size(2048, Heads(16, 2, 128)),
}


class Attention(NamedTuple):
    """Attention state that the layers of a step share: page table and slots of the rows, and how these
    attend, with queries [rows, heads, dim] to a layer's pages."""

    kept: inputs.Pages
    attend: Callable[[Tensor, Pages], Tensor]


def attention(
    size: Size, lengths: list[int], cut: DecodeConfig | None, dtype: torch.dtype, device: torch.device
) -> Attention:
    """Return what the layers share in a step of rows with `lengths` keys. They attend by the Triton kernels
    with the config `cut`, or by `ClusterDecode` if it is None."""
    (_, heads), rows = size, len(lengths)
    kept = inputs.pages(lengths, PAGE, heads, dtype, device)
    own, pdl = kept.lengths[kept.slots], device.type == "cuda"
    if cut is not None:
        plan = plan_decode(kept.slots, own, cut)
        space = decode_workspace(rows, heads.q, heads.kv, heads.dim, cut, device)
        return Attention(kept, partial(paged_decode, plan=plan, workspace=space, config=cut, pdl=pdl))
    kernel, count = ClusterDecode(*heads, dtype, device), inputs.scalar(rows, device)
    slots, seen = kept.slots.int(), own.int()

    def attend(q: Tensor, pages: Pages) -> Tensor:
        out = q.new_empty(rows, heads.q * heads.dim)
        kernel(q, pages, slots, seen, count, out=out, pdl=pdl)
        return out

    return Attention(kept, attend)


def layer(
    size: Size, shared: Attention, residual: Tensor, attends: bool, products: GemvConfig | None = None
) -> Callable[[], None]:
    """Return a function that runs one layer on `residual` [rows, hidden], with its own weights, keys and
    values. `products` is the config of both products, by default that of `gemv_config`."""
    (hidden, heads), device, dtype = size, residual.device, residual.dtype
    rows, width, pdl = len(residual), heads.q * heads.dim, residual.is_cuda
    qkv, out = (
        0.02 * torch.randn(*shape, device=device, dtype=dtype)
        for shape in ((width + 2 * heads.kv * heads.dim, hidden), (hidden, width))
    )
    of_qkv, of_out = products or gemv_config(rows, qkv), products or gemv_config(rows, out)
    assert of_qkv is not None and of_out is not None
    ones, turn = torch.ones_like(residual[0]), torch.ones(rows, 1, heads.dim, device=device, dtype=dtype)
    head_norms, still = (turn[0, 0], turn[0, 0], EPS), torch.zeros_like(turn)
    kept, attend = shared
    last = kept.lengths[kept.slots] - 1
    where = kept.table[kept.slots, last // PAGE] * PAGE + last % PAGE
    both = torch.randn(len(kept.k), 2, heads.kv, heads.dim, device=device).to(dtype)
    caches = both[:, 0], both[:, 1]
    pages = kept._replace(k=caches[0], v=caches[1]).layer(PAGE, heads.dim**-0.5)

    def call() -> None:
        made = gemv(residual, qkv, None, of_qkv, norm=(ones, EPS), pdl=pdl)
        q_out = made.new_empty(rows, width)
        q = norm_rope_store(made, caches, where, (turn, still), head_norms, q_out=q_out, pdl=pdl)
        found = attend(q, pages) if attends else q.view(rows, width)
        gemv(found, out, None, of_out, residual=residual, pdl=pdl)

    return call


def measure(size: Size, lengths: list[int], cut: DecodeConfig | None, attends: bool = True) -> float:
    """Microseconds a layer."""
    residual = torch.randn(len(lengths), size.hidden, device="cuda", dtype=torch.bfloat16)
    shared = attention(size, lengths, cut, residual.dtype, residual.device)
    layers = [layer(size, shared, residual, attends) for _ in range(LAYERS)]
    return microseconds(layers, least=LAYERS)


def main(argv: list[str] | None = None) -> int:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--name", default="one-row")
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--keys", type=int, nargs="+", default=[1040])
    args = parser.parse_args(argv)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(0), "unit": "us a layer"}
    for (name, size), rows in product(MODELS.items(), args.rows):
        _, kv_heads, dim = size.heads
        cut = decode_config(dim, kv_heads, processors, rows, group=size.heads.q // kv_heads)
        cases = {"a cluster": (None, True), "Triton": (cut, True), "none": (cut, False)}
        found: dict[str, dict[str, float]] = {case: {} for case in cases}
        for keys in args.keys:
            # In turn, twice: the clock of a device that was idle is another.
            times = [
                {case: measure(size, [keys] * rows, *how) for case, how in cases.items()} for _ in range(2)
            ]
            best = {case: min(each[case] for each in times) for case in cases}
            for case, us in best.items():
                found[case][str(keys)] = round(us - best["none"] if case != "none" else us, 2)
        results[f"{name}, rows {rows}"] = found
        print(name, "rows", rows, found, flush=True)
        save(args.name, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
