"""What `few_rows_moe` computes of weights of 4-bit integers (`gpu.quant.int4`).

An output's words lie beside each other, so that a thread loads eight at once, with one group for each of
their four numbers. It sums products of the numbers, as `numbers_of` makes them, and then takes off the zero
point's share and scales: three operations a weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from gpu.kernels.gemm.gemv import WIDE, dots
from gpu.kernels.gemm.int4 import load_pair, numbers_of, split_pair
from gpu.kernels.jit import jit
from gpu.quant.int4 import WORD, span

_WORD = tl.constexpr(WORD)


class FineShape(NamedTuple):
    """Distance between the numbers of a word, and inputs of a group."""

    span: int
    group: int


def fine_shape(scales: Tensor, inputs: int) -> tuple[FineShape, Tensor]:
    """Return the shape of matrices with `scales` [experts, groups, outputs, 2], and the scales as kernels
    read them."""
    group = inputs // scales.shape[1]
    whole = scales if scales.dtype == torch.float32 else scales.view(torch.int32)
    return FineShape(span(inputs, group), group), whole


@jit
def _inputs(words: tl.tensor, AT: tl.constexpr, FINE: tl.constexpr) -> tl.tensor:
    """Indices of the inputs that the numbers `AT` of the `words` belong to."""
    return (words // FINE.span * _WORD + AT) * FINE.span + words % FINE.span


@jit
def _of_expert(
    scales: tl.tensor, expert: tl.tensor, outputs: tl.constexpr, K: tl.constexpr, FINE: tl.constexpr
) -> tl.tensor:
    """Pointer to the scales of an expert with so many `outputs`."""
    each: tl.constexpr = 2 if scales.dtype.element_ty == tl.float32 else 1  # numbers of a pair
    return scales + expert.to(tl.int64) * (each * outputs * (K // FINE.group))


@jit
def fine_row(
    x: tl.tensor, K: tl.constexpr, WARPS: tl.constexpr, BLOCK_W: tl.constexpr, FINE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The row at `x` for every warp, as words meet it: of each BLOCK_W words a tuple of [WARPS, BLOCK_W] for
    each of their four numbers; and sums float32 [WARPS, BLOCK_W / WIDE] of neighbours."""
    found: tl.tensor = ()
    sums: tl.tensor = ()
    for first in tl.static_range(0, K // _WORD, BLOCK_W):
        words = first + tl.arange(0, BLOCK_W)[None, :] + tl.zeros([WARPS, 1], tl.int32)
        for at in tl.static_range(_WORD):
            some = tl.load(x + _inputs(words, at, FINE), mask=words < K // _WORD, other=0.0)
            found += (some,)
            sums += (tl.sum(tl.reshape(some.to(tl.float32), [WARPS, BLOCK_W // WIDE, WIDE]), 2),)
    return found, sums


@jit
def _scaled(
    products: tl.tensor, sums: tl.tensor, scales: tl.tensor, at: tl.tensor, there: tl.tensor, like: tl.tensor
) -> tl.tensor:
    """Turn `products` of unscaled numbers with a row into products of weights. `sums` are the sums of the
    row. Scale and zero point are loaded at `at` where `there` is true; `like` points to the numbers'
    dtype."""
    scale, zero = split_pair(load_pair(scales, at, there), like)
    return (products - zero.to(tl.float32) * sums) * scale.to(tl.float32)


@jit
def fine_up_sums(
    gates: tl.tensor,
    ups: tl.tensor,
    row: tl.tensor,
    sums: tl.tensor,
    scales: tl.tensor,
    cols: tl.tensor,
    expert: tl.tensor,
    like: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    WARPS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    FINE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """float32 [WARPS, BLOCK_W / WIDE] of gate and of up, which sum along the second axis to their products of
    `row` and its `sums` (`fine_row`) with an expert's words `gates` and `ups` of the columns `cols`."""
    own = _of_expert(scales, expert, 2 * N, K, FINE)
    gate = tl.zeros([WARPS, BLOCK_W // WIDE], tl.float32)
    up = tl.zeros([WARPS, BLOCK_W // WIDE], tl.float32)
    for i in tl.static_range((K // _WORD + BLOCK_W - 1) // BLOCK_W):
        first = i * BLOCK_W + tl.arange(0, BLOCK_W // WIDE)[None, :] * WIDE
        there = (cols < N)[:, None] & (first < K // _WORD)
        for at in tl.static_range(_WORD):
            some, less = row[i * _WORD + at].to(tl.float32), sums[i * _WORD + at]
            by = _inputs(first, at, FINE) // FINE.group * (2 * N) + cols[:, None]
            products = dots(numbers_of(gates[i], like, at).to(tl.float32), some, WARPS, BLOCK_W)
            gate += _scaled(products, less, own, by, there, like)
            products = dots(numbers_of(ups[i], like, at).to(tl.float32), some, WARPS, BLOCK_W)
            up += _scaled(products, less, own, N + by, there, like)
    return gate, up


@jit
def fine_down_sums(
    held: tl.tensor,
    hidden: tl.tensor,
    pair: tl.tensor,
    live: tl.tensor,
    scales: tl.tensor,
    expert: tl.tensor,
    cols: tl.tensor,
    inside: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_W: tl.constexpr,
    FINE: tl.constexpr,
) -> tl.tensor:
    """float32 [BLOCK_J, SPAN, BLOCK_W / WIDE] that sum along the last axis to the products of the rows `pair`
    of `hidden`, where `live`, with the words `held` of their experts, for the columns `cols`."""
    J: tl.constexpr = inside.shape[0]
    SPAN: tl.constexpr = cols.shape[0]
    own = _of_expert(scales, expert, N, K, FINE)[:, None, None]
    total = tl.zeros([J, SPAN, BLOCK_W // WIDE], tl.float32)
    for i in tl.static_range((K // _WORD + BLOCK_W - 1) // BLOCK_W):
        words = i * BLOCK_W + tl.arange(0, BLOCK_W)[None, :]
        first = i * BLOCK_W + tl.arange(0, BLOCK_W // WIDE)[None, None, :] * WIDE
        there = inside & (first < K // _WORD)
        for at in tl.static_range(_WORD):
            near = hidden + pair[:, None] * K + _inputs(words, at, FINE)
            some = tl.load(near, mask=live[:, None] & (words < K // _WORD), other=0.0).to(tl.float32)
            less = tl.sum(tl.reshape(some, [J, BLOCK_W // WIDE, WIDE]), 2)[:, None, :]
            products = numbers_of(held[i], hidden, at).to(tl.float32) * some[:, None, :]
            products = tl.sum(tl.reshape(products, [J, SPAN, BLOCK_W // WIDE, WIDE]), 3)
            by = _inputs(first, at, FINE) // FINE.group * N + cols[None, :, None]
            total += _scaled(products, less, own, by, there, hidden)
    return total
