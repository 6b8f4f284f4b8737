"""What attention costs a lone row between products: `python -m bench.kernels.one_row`.

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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.kernels import inputs
from bench.kernels.inputs import Heads
from bench.kernels.timing import microseconds
from bench.results import save
from gpu.kernels.attention.decode import Workspace, decode_workspace, paged_decode
from gpu.kernels.attention.decode_config import DecodeConfig, decode_config
from gpu.kernels.attention.decode_plan import DecodePlan, plan_decode
from gpu.kernels.attention.qk_norm_rope_store import norm_rope_store
from gpu.kernels.gemm.gemv import GemvConfig, gemv, gemv_config

PAGE, LAYERS, EPS = 16, 24, 1e-6


class Size(NamedTuple):
    """Of a model's layers."""

    hidden: int
    heads: Heads


MODELS = {"Qwen3-8B": Size(4096, Heads(32, 8, 128)), "Qwen3-30B-A3B": Size(2048, Heads(32, 4, 128))}


class Attention(NamedTuple):
    """What the layers of a step share: page table and slot of the row, decode config, plan and workspace."""

    kept: inputs.Pages
    cut: DecodeConfig
    plan: DecodePlan
    space: Workspace


def attention(
    size: Size, keys: int, cut: DecodeConfig, dtype: torch.dtype, device: torch.device
) -> Attention:
    """Return what the layers share in a step of one row with `keys` keys."""
    heads = size.heads
    kept = inputs.pages([keys], PAGE, heads, dtype, device)
    plan = plan_decode(kept.slots, kept.lengths[kept.slots], cut)
    return Attention(kept, cut, plan, decode_workspace(1, heads.q, heads.kv, heads.dim, cut, device))


def layer(
    size: Size, shared: Attention, residual: Tensor, attends: bool, products: GemvConfig | None = None
) -> Callable[[], None]:
    """Return a function that runs one layer on `residual` [1, hidden], with its own weights, keys and values.
    `products` is the config of both products, by default that of `gemv_config`."""
    (hidden, heads), device, dtype = size, residual.device, residual.dtype
    width, pdl = heads.q * heads.dim, residual.is_cuda
    qkv, out = (
        0.02 * torch.randn(rows, columns, device=device, dtype=dtype)
        for rows, columns in ((width + 2 * heads.kv * heads.dim, hidden), (hidden, width))
    )
    of_qkv, of_out = products or gemv_config(1, qkv), products or gemv_config(1, out)
    assert of_qkv is not None and of_out is not None
    ones, turn = torch.ones_like(residual[0]), torch.ones(1, 1, heads.dim, device=device, dtype=dtype)
    head_norms, still = (turn.flatten(), turn.flatten(), EPS), torch.zeros_like(turn)
    kept, cut, plan, space = shared
    last = kept.lengths[kept.slots] - 1
    where = kept.table[kept.slots, last // PAGE] * PAGE + last % PAGE
    both = torch.randn(len(kept.k), 2, heads.kv, heads.dim, device=device).to(dtype)
    caches = both[:, 0], both[:, 1]
    pages = kept._replace(k=caches[0], v=caches[1]).layer(PAGE, heads.dim**-0.5)

    def call() -> None:
        made = gemv(residual, qkv, None, of_qkv, norm=(ones, EPS), pdl=pdl)
        q_out = made.new_empty(1, width)
        q = norm_rope_store(made, caches, where, (turn, still), head_norms, q_out=q_out, pdl=pdl)
        found = paged_decode(q, pages, plan, space, cut, pdl=pdl) if attends else q.view(1, width)
        gemv(found, out, None, of_out, residual=residual, pdl=pdl)

    return call


def measure(size: Size, keys: int, cut: DecodeConfig, attends: bool = True) -> float:
    """Microseconds a layer."""
    residual = torch.randn(1, size.hidden, device="cuda", dtype=torch.bfloat16)
    shared = attention(size, keys, cut, residual.dtype, residual.device)
    layers = [layer(size, shared, residual, attends) for _ in range(LAYERS)]
    return microseconds(layers, least=LAYERS)


def main(argv: list[str] | None = None) -> int:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--name", default="one-row")
    parser.add_argument("--keys", type=int, default=1040)
    args = parser.parse_args(argv)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(0), "keys": args.keys}
    for name, size in MODELS.items():
        cut = decode_config(size.heads.dim, size.heads.kv, processors, 1, group=size.heads.q // size.heads.kv)
        without = measure(size, args.keys, cut, attends=False)
        cuts = {"as served": cut, "nothing ahead, last program merges": cut._replace(newest=0)}
        times = {case: round(measure(size, args.keys, each) - without, 2) for case, each in cuts.items()}
        results[name] = {"without_attention_us": round(without, 2), "attention_us": times}
        print(name, results[name], flush=True)
        save(args.name, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
