"""Decode attention of few rows in one launch (`cluster_decode.cu`).

Attention of one row takes a few microseconds, most of them waiting for memory. `paged_decode` needs two
launches: programs store partial results, and a second kernel merges them. Here a cluster of thread blocks
computes one row and KV head, and its blocks merge their results through each other's shared memory, which
Triton does not offer.

A cluster runs on at most 16 multiprocessors, so this is for few rows with few keys. µs a layer on an H200
for rows of 200, 1,040, 4,000 and 16,000 keys and heads of 128, in parentheses `paged_decode` and its merge
kernel (`python -m bench.kernels.one_row`, `bench/results/history/h200-cluster-decode.json`):

    1 x 8 KV heads    2.1  3.6   8.0  19.6  (3.4  5.1   9.3  22.8)
    1 x 4             1.4  2.5   6.2  14.9  (2.8  4.3   6.6  13.9)
    1 x 2             2.0  2.4   5.1  11.7  (3.2  3.8   5.7  11.1)
    2 x 4             1.7  2.8   7.3  19.1  (2.9  4.5   8.5  22.2)
    2 x 8             5.2  6.9  14.7  43.7  (3.8  6.9  13.2  39.0)  not served: 15 clusters run at once

Heads of 256, for which a block has room for 8 warps, were slower from 1,040 keys on.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from gpu.kernels.attention.pages import Pages
from gpu.kernels.cuda_kernel import Blocks, CudaKernel, compile_kernel

SOURCE = Path(__file__).with_suffix(".cu")

CAPABILITY = (9, 0)
"""Compute capability of the device that it was measured on."""

CHUNK = 16
"""Keys that a warp attends to at once: a page has a multiple of them."""

DIMS, GROUP = (64, 128), 8
"""Columns that a head may have, and the most query heads of a KV head."""

WARPS = 16
"""Warps of a block. Each has shared memory for 16 keys, their values, and 8 queries."""

MOST_CLUSTERS = 8
"""KV heads times rows; at 16 some of them wait for others."""


def supported(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, page_size: int) -> bool:
    """Return whether the kernel supports these heads, dtype and page size."""
    fits = dim in DIMS and heads <= GROUP * kv_heads and kv_heads <= MOST_CLUSTERS
    return fits and dtype in (torch.bfloat16, torch.float16) and page_size % CHUNK == 0


class ClusterDecode:
    """The kernel for a model's heads, compiled, on one GPU. Owner: launch thread."""

    def __init__(self, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        """The arguments must be `supported`. Raises `RuntimeError` where the kernel cannot be compiled or
        run."""
        self._kv_heads = kv_heads
        self._kernels: dict[int, CudaKernel] = {}
        for cluster in {self._cluster(rows) for rows in range(1, MOST_CLUSTERS // kv_heads + 1)}:
            constants = {
                "GROUP": heads // kv_heads,
                "DIM": dim,
                "CLUSTER": cluster,
                "WARPS": WARPS,
                "FLOAT16": int(dtype == torch.float16),
            }
            code = compile_kernel(SOURCE, constants, CAPABILITY)
            blocks = Blocks(cluster, 32 * WARPS, WARPS * (2 * CHUNK + GROUP) * 2 * dim)
            self._kernels[cluster] = CudaKernel(code, "cluster_decode", blocks, device)

    def _cluster(self, rows: int) -> int:
        """Return the thread blocks of a cluster. Starting and merging 16 takes up to 0.7 us longer than 8,
        but one or two clusters of 8 use too few multiprocessors from 2,000 keys on."""
        return 16 if rows * self._kv_heads <= 2 else 8

    def takes(self, rows: int, deep: bool) -> bool:
        """Return whether this is faster than `paged_decode` for so many rows. In `deep` graphs, whose rows
        may have more than `gpu.step.steps.DEEP_ROW_KEYS` keys, it is only with `MOST_CLUSTERS` clusters."""
        clusters = rows * self._kv_heads
        return clusters == MOST_CLUSTERS or (clusters < MOST_CLUSTERS and not deep)

    def __call__(
        self,
        q: Tensor,
        pages: Pages,
        slots: Tensor,
        lengths: Tensor,
        num_rows: Tensor,
        *,
        out: Tensor,
        window: int = 0,
        newest: int = 1,
        pdl: bool = False,
    ) -> None:
        """Attend with one query per row and grouped heads, for a number of rows that it `takes`.

        q        [rows, heads, dim], heads and dim contiguous
        slots    int32 [rows or more]
        lengths  int32 [rows or more]: keys that a row sees, at least 1, in padded rows too
        num_rows int32 [1] on the device; rows behind it are padding, and not written
        out      [rows, heads * dim], contiguous
        window   keys that a row sees at most, 0 for all
        newest   keys of a row, at most, that this step adds: the others are read before the kernel that
                 stores these has ended
        """
        rows = len(q)
        assert not pages.cap and pages.scales == (1.0, 1.0), "no capped scores and no float8 pages"
        assert pages.sinks is None or pages.sinks.dtype == q.dtype
        cluster = self._cluster(rows)
        self._kernels[cluster](
            (cluster, self._kv_heads, rows),
            q, q.stride(0), pages.k, pages.v, pages.k.stride(0), pages.size.bit_length() - 1,
            pages.table, pages.table.stride(0), slots, lengths, num_rows, pages.sinks, out,
            pages.scale * math.log2(math.e), window, newest,
            pdl=pdl,
        )  # fmt: skip
