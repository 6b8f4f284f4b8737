"""Decode attention: FlashInfer's XQA against Loom's kernel: `python -m bench.kernels.xqa`.

Written to bench/results/decode-xqa.json, the figure behind `gpu.attention.selector.BEST`. Both read the same
pages, in graphs, with `--kv-dtype fp8` of e4m3; the errors are relative to attention in float32 over these
pages. The last two cases but one hold as many keys, once with a row that is as long as all others together;
the last one's row ends within a page whose other tokens are NaN.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any

import torch

from bench.kernels import inputs
from bench.kernels.inputs import Heads, Pages
from bench.kernels.timing import BANDWIDTH, Row, microseconds
from bench.results import save
from gpu.kernels.attention.decode import decode_workspace, paged_decode
from gpu.kernels.attention.decode_config import decode_config
from gpu.kernels.attention.decode_plan import plan_decode

PAGE = 16

CASES = {
    "1 x 1,024": [1024],
    "32 x 1,024": [1024] * 32,
    "256 x 1,024": [1024] * 256,
    "64 x 8,192": [8192] * 64,
    "64 x 1,024": [1024] * 64,
    "63 x 512, 1 x 32,768": [32_768] + [512] * 63,
    "1 x 1,001": [1001],
}
"""Rows and their keys."""

SCRATCH = 256 << 20
"""Bytes of XQA's workspace, more than any of these cases needs."""


def xqa_call(kept: Pages, q: torch.Tensor, heads: Heads) -> Any:
    """Return a function that runs XQA over the pages `kept` and returns its output [n, heads, dim]."""
    from flashinfer.xqa import xqa

    rows = len(q)
    k, v = (part.view(-1, PAGE, heads.kv, heads.dim) for part in (kept.k, kept.v))
    # XQA expects the page table in the order of rows; Loom's is indexed by slot.
    table = kept.table[kept.slots].contiguous()
    lengths = kept.lengths[kept.slots].to(torch.int32).view(torch.uint32)[:, None]
    out = torch.empty_like(q)
    scratch = torch.empty(SCRATCH, dtype=torch.uint8, device=q.device)
    semaphores = torch.zeros(rows * heads.kv * 8, dtype=torch.int32, device=q.device).view(torch.uint32)

    def call() -> torch.Tensor:
        xqa(q[:, None], k, v, table, lengths, out[:, None], scratch, semaphores, heads.kv, PAGE)
        return out

    return call


def ours(kept: Pages, q: torch.Tensor, heads: Heads) -> Any:
    """A call of `paged_decode` on the same inputs."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    coarse = kept.k.dtype == torch.float8_e4m3fn
    config = decode_config(heads.dim, heads.kv, processors, len(q), group=heads.q // heads.kv, coarse=coarse)
    plan = plan_decode(kept.slots, kept.lengths[kept.slots], config)
    space = decode_workspace(len(q), heads.q, heads.kv, heads.dim, config, q.device)
    return partial(paged_decode, q, kept.layer(PAGE, heads.dim**-0.5), plan, space, config)


def plain(kept: Pages, q: torch.Tensor, heads: Heads) -> torch.Tensor:
    """Reference attention in float32 with torch, a row at a time."""
    rows = []
    for slot, query in zip(kept.slots.tolist(), q.float(), strict=True):
        at = torch.arange(int(kept.lengths[slot]), device=q.device)
        token = kept.table[slot].long()[at // PAGE] * PAGE + at % PAGE
        k, v = (side[token].float().repeat_interleave(heads.q // heads.kv, 1) for side in (kept.k, kept.v))
        weights = torch.einsum("hd,thd->ht", query, k).mul(heads.dim**-0.5).softmax(1)
        rows.append(torch.einsum("ht,thd->hd", weights, v))
    return torch.stack(rows)


def measure(heads: Heads, lengths: list[int], dtype: torch.dtype) -> dict[str, float]:
    """Microseconds, terabytes per second and relative errors of both kernels."""
    device = torch.device("cuda")
    moved = 2 * sum(lengths) * heads.kv * heads.dim * dtype.itemsize
    sets = max(1, min(4, int(200e6 / moved)))  # together larger than the L2 cache
    made = (inputs.pages(lengths, PAGE, heads, torch.bfloat16, device) for _ in range(sets))
    kept = [each._replace(k=both[:, 0], v=both[:, 1]) for each in made for both in (_cast(each, dtype),)]
    q = torch.randn(len(lengths), heads.q, heads.dim, device=device).to(torch.bfloat16)
    found: dict[str, float] = {}
    truth = plain(kept[0], q, heads)
    for name, make in (("ours", ours), ("xqa", xqa_call)):
        calls = [make(each, q, heads) for each in kept]
        error = (calls[0]().float().view_as(q) - truth).norm() / truth.norm()
        us = microseconds(calls)
        found |= {f"{name}_us": round(us, 1), f"{name}_tb_s": round(moved / us / 1e6, 3)}
        found[f"{name}_error"] = round(float(error), 5)
        shape = f"{len(lengths)} x ~{sum(lengths) // len(lengths)} error {float(error):.5f}"
        print(Row(name, shape, us, moved).line(), flush=True)
    return found


def _cast(kept: Pages, dtype: torch.dtype) -> torch.Tensor:
    """K and V [tokens, 2, heads, dim] in `dtype`, one allocation as in a pool."""
    return torch.stack((kept.k, kept.v), 1).to(dtype)


def main(argv: list[str] | None = None) -> int:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--name", default="decode-xqa")
    parser.add_argument("--kv-dtype", choices=("auto", "fp8"), default="auto", help="as of the server")
    args = parser.parse_args(argv)
    dtype = torch.float8_e4m3fn if args.kv_dtype == "fp8" else torch.bfloat16
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(0), "bandwidth": BANDWIDTH}
    for heads in (Heads(), Heads(32, 8, 128)):
        by_case = results[f"{heads.q} heads, {heads.kv} of keys"] = {}
        for case, lengths in CASES.items():
            by_case[case] = measure(heads, lengths, dtype)
            save(args.name, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
