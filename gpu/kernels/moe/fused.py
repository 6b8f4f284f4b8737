"""A layer's routed experts from router logits to the next norm: which kernels, in which order.

up to a few rows    few_rows_moe, rms_norm                              3 launches
up to 128 rows      choose, sort, gate_up, down, moe_sum                5
above               route, scatter, gate_up, down, moe_sum              5

MXFP4 weights go by the grouped products at any number of rows. Weights of 8 bits multiply rows that are
quantised first, 2 launches more; `few_rows_moe` widens them instead, since reading them is its time. Adapters
are a launch more in front of each GEMM, and few rows take these GEMMs too, as they do where experts are not
the best of a plain softmax (`Choice`).
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from core.models.quant import BLOCK
from gpu.experts import Experts
from gpu.kernels.gemm.quant import quantise_rows
from gpu.kernels.jit import cdiv
from gpu.kernels.moe.adapters import PairDelta, PairDeltaShape, shrink_pairs
from gpu.kernels.moe.combine import moe_sum
from gpu.kernels.moe.few_rows import few_rows_moe
from gpu.kernels.moe.grouped_gemm import grouped_gemm
from gpu.kernels.moe.route import route
from gpu.kernels.moe.tuned import MoeConfig
from gpu.kernels.norm import rms_norm
from gpu.lora import LoraRows


def runs_few_rows(experts: Experts, config: MoeConfig, adapters: LoraRows | None) -> bool:
    """Whether `few_rows_moe` runs `experts`."""
    few = config.small and experts.choice.plain and not experts.is_mxfp4
    return few and (adapters is None or not any(experts.lora))


def fused_moe(
    x: Tensor,
    logits: Tensor,
    experts: Experts,
    config: MoeConfig,
    after: tuple[Tensor, Tensor, float] | None,
    *,
    keep: Tensor | None = None,
    adapters: LoraRows | None = None,
    num_rows: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Run the top-k experts of each row and sum their outputs by router weight. With `after` the sum is added
    to the residual and normed in the same kernel.

    x         [T, hidden], contiguous
    logits    [T, experts], contiguous: the router's
    config    from `gpu.kernels.moe.tuned`, for T rows
    after     the residual [T, hidden], updated in place, the next norm's weight [hidden], and eps; None: the
              sum is wanted
    keep      [T, hidden], whose rows may be strided, gets the new residual too
    adapters  of the rows, if any have one: deltas by `experts.lora` are added to gate and up before silu, to
              down before the weights
    num_rows  int32 [1] on the device; rows from there on read no expert and are not written
    returns   the normed [T, hidden], or the sum, in x's dtype
    """
    if runs_few_rows(experts, config, adapters):
        total, _ = few_rows_moe(x, logits, experts, num_rows=num_rows, pdl=pdl)
        if after is None:
            return total
        residual, norm, eps = after
        return rms_norm(total, norm, eps, residual=residual, keep=keep, num_rows=num_rows, pdl=pdl)
    w13, w2, top_k, renormalise, _, scales, lora, biases, clamped, choice, _ = experts
    routing, tiles = route(
        logits, top_k, config.block_m, renormalise=renormalise, choice=choice, num_rows=num_rows, pdl=pdl
    )
    tall, up, low = config.block_m, config.up, config.down

    def delta(rows: Tensor, at: int, after: int) -> tuple[PairDelta, PairDeltaShape] | None:
        """The adapters' deltas for the layer's first or second GEMM of `rows`."""
        if adapters is None or (own := lora[at]) is None:
            return None
        return shrink_pairs(rows, own, adapters, tiles, tall, top_k, gathered=at == 0, after=after, pdl=pdl)

    def product(rows: Tensor, at: int) -> tuple[Tensor, tuple[PairDelta, PairDeltaShape] | None]:
        """The layer's first or second GEMM of `rows`, and the deltas that it adds."""
        gated = at == 0
        w, cut = ((w13, up), (w2, low))[at]
        gemm = partial(
            grouped_gemm, gated=gated, bias=biases[at] if biases else None, clamped=clamped, pdl=pdl
        )
        if scales is None or experts.is_packed:
            after = 0 if gated else cdiv(rows.shape[1], up.block_n)
            more = delta(rows, at, after)
            packed = None if scales is None else scales[at]
            return gemm(rows, w, tiles, tall, cut, packed=packed, after=after, delta=more), more
        group = BLOCK if scales[at].dim() == w.dim() else 0
        # Places are sorted: those of true rows come first, top_k of each.
        per = 1 if gated else top_k
        numbers, by_row = quantise_rows(rows, w.dtype, group=group, per=per, num_rows=num_rows, pdl=pdl)
        by, more = (by_row, scales[at]), delta(rows, at, 0)
        return gemm(numbers, w, tiles, tall, cut, scales=by, dtype=x.dtype, delta=more), more

    # Held: the second delta is computed while programs of the first GEMM still read theirs.
    hidden, held = product(x, 0)
    parts, _ = product(hidden, 1)
    del held
    return moe_sum(parts, routing, x.dtype, after, keep=keep, num_rows=num_rows, pdl=pdl)
