"""A layer's keys and values in pages, as launchers and as kernels take them.

In Triton 3.6 the fields of a constant record are plain numbers, which lists and `tl.static_range` do not
take: kernels assign those to a constexpr first (`block_d: tl.constexpr = SHAPE.block_d`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gpu.kernels.jit import cdiv, pow2


class Pages(NamedTuple):
    """A layer's pages, and how queries are scored with their keys.

    k, v     [tokens, kv_heads, dim] with (kv_heads, dim) contiguous and equal strides: views of a layer's
             pages flattened to tokens; K and V of this step already stored. Of latents (MLA) V is K's first
             columns, [tokens, 1, dim] of [tokens, 1, dim + tail]
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

    kv       KV heads; of latents parts of the query heads, which all attend to the one there is
    group    query heads per KV head, or of a part
    wide     offsets into the pages need 64 bits, which cost 18 to 38 registers a thread
    block_d  dim rounded up to a power of two of at least 16, the least that tensor cores multiply
    step     columns from a KV head to the next; 0 of latents, which all parts read
    tail     columns of keys behind `dim`, which values do not have: keys are latents
    block_t  tail likewise
    paired   values are float8, and two columns of them are loaded as one integer: see `attend_tile`
    """

    kv: int
    group: int
    dim: int
    page: int
    cap: float
    wide: bool
    block_d: int
    step: int
    tail: int
    block_t: int
    paired: bool


LATENT_GROUP = 16
"""Query heads that read a latent together: as many as the least tile of a tensor core has rows. Their results
of 512 columns are 64 registers a thread of four warps."""


def latent_parts(heads: int) -> int:
    """Parts that so many query heads over latents are cut into: equal, and as few as can be."""
    return next(n for n in range(cdiv(heads, LATENT_GROUP), heads + 1) if heads % n == 0)


def kernel_args(q: Tensor, pages: Pages) -> tuple[Keys, Shape]:
    """Arguments of a kernel that attends with `q` [n, heads, dim], over latents [n, heads, dim + tail]."""
    k, v, table, size, scale, cap, (k_scale, v_scale), sinks = pages
    _, kv_heads, dim = v.shape
    tail = k.shape[2] - dim
    if tail:
        kv_heads = latent_parts(q.shape[1])
    keys = Keys(k, v, table, k.stride(0), table.stride(0), scale * k_scale, v_scale, sinks)
    wide = len(k) * k.stride(0) >= 2**31
    step, block_t = (0, max(pow2(tail), 16)) if tail else (dim, 0)
    group = q.shape[1] // kv_heads
    paired = v.dtype == torch.float8_e4m3fn and not tail and dim % 2 == 0
    return keys, Shape(kv_heads, group, dim, size, cap, wide, max(pow2(dim), 16), step, tail, block_t, paired)
