"""A layer's keys and values in pages, as launchers and as kernels take them.

In Triton 3.6 the fields of a constant record are plain numbers, which lists and `tl.static_range` do not
take: kernels assign those to a constexpr first (`block_d: tl.constexpr = SHAPE.block_d`).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from gpu.kernels.jit import pow2


class Pages(NamedTuple):
    """A layer's pages, and how queries are scored with their keys.

    k, v     [tokens, kv_heads, dim] with (kv_heads, dim) contiguous and equal strides: views of a layer's
             pages flattened to tokens; K and V of this step already stored
    table    integer [max_slots, pages]; entries past a slot's length are not read as keys
    size     tokens per page
    scale    of scores
    cap      scores s become cap · tanh(s / cap); 0 for none
    scales   what K and V of float8 pages are multiplied by
    sinks    [heads]: scores of a key more, which has no value; None: there is none
    """

    k: Tensor
    v: Tensor
    table: Tensor
    size: int
    scale: float
    cap: float = 0.0
    scales: tuple[float, float] = (1.0, 1.0)
    sinks: Tensor | None = None


class Keys(NamedTuple):
    """What a kernel reads of `Pages`; the strides are those of a token and of a slot."""

    k: Tensor
    v: Tensor
    table: Tensor
    stride: int
    table_stride: int
    scale: float
    v_scale: float
    sinks: Tensor | None


class Shape(NamedTuple):
    """Constants of a kernel over `Pages`.

    group    query heads per KV head
    wide     offsets into the pages need 64 bits, which cost 18 to 38 registers a thread
    block_d  dim rounded up to a power of two
    """

    kv: int
    group: int
    dim: int
    page: int
    cap: float
    wide: bool
    block_d: int


def kernel_args(q: Tensor, pages: Pages) -> tuple[Keys, Shape]:
    """Of a kernel that attends with `q` [n, heads, dim]."""
    k, v, table, size, scale, cap, (k_scale, v_scale), sinks = pages
    _, kv_heads, dim = k.shape
    keys = Keys(k, v, table, k.stride(0), table.stride(0), scale * k_scale, v_scale, sinks)
    wide = len(k) * k.stride(0) >= 2**31
    return keys, Shape(kv_heads, q.shape[1] // kv_heads, dim, size, cap, wide, pow2(dim))
