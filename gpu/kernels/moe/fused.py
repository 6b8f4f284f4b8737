"""A layer's routed experts from router logits to the next norm: which kernels, in which order.

up to a few rows    few_rows_moe, rms_norm                              3 launches
up to 128 rows      choose, sort, gate_up, down, moe_sum_add_norm       5
above               route, scatter, gate_up, down, moe_sum_add_norm     5

FP8 weights multiply rows that are quantised first, 2 launches more; `few_rows_moe` widens them instead, since
reading them is its time.
"""

from __future__ import annotations

from torch import Tensor

from core.models.quant import BLOCK
from gpu.experts import Experts
from gpu.kernels.gemm.quant import quantise_rows
from gpu.kernels.moe.combine import moe_sum_add_norm
from gpu.kernels.moe.few_rows import few_rows_moe
from gpu.kernels.moe.grouped_gemm import grouped_gemm
from gpu.kernels.moe.route import route
from gpu.kernels.moe.tuned import MoeConfig
from gpu.kernels.norm import rms_norm


def fused_moe_add_norm(
    x: Tensor,
    logits: Tensor,
    experts: Experts,
    config: MoeConfig,
    after: tuple[Tensor, Tensor, float],
    *,
    keep: Tensor | None = None,
    num_rows: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """The weighted sum of each row's best experts' gated MLPs, added to the residual and normed.

    x         [T, hidden], contiguous
    logits    [T, experts], contiguous: the router's
    config    from `gpu.kernels.moe.tuned`, for T rows
    after     the residual [T, hidden], updated in place, the next norm's weight [hidden], and eps
    keep      [T, hidden], whose rows may be strided, gets the new residual too
    num_rows  int32 [1] on the device; rows from there on read no expert and are not written
    returns   the normed [T, hidden] in x's dtype
    """
    residual, norm, eps = after
    if config.small:
        total, _ = few_rows_moe(x, logits, experts, num_rows=num_rows, pdl=pdl)
        return rms_norm(total, norm, eps, residual=residual, keep=keep, num_rows=num_rows, pdl=pdl)
    w13, w2, top_k, renormalise, _, scales, _ = experts
    routing, tiles = route(logits, top_k, config.block_m, renormalise=renormalise, num_rows=num_rows, pdl=pdl)
    tall, up, low = config.block_m, config.up, config.down
    if scales is None:
        hidden = grouped_gemm(x, w13, tiles, tall, up, gated=True, pdl=pdl)
        parts = grouped_gemm(hidden, w2, tiles, tall, low, after=up, pdl=pdl)
    else:
        s13, s2 = scales
        group = BLOCK if s13.dim() == w13.dim() else 0
        numbers, rows = quantise_rows(x, group=group, num_rows=num_rows, pdl=pdl)
        hidden = grouped_gemm(
            numbers, w13, tiles, tall, up, gated=True, scales=(rows, s13), dtype=x.dtype, pdl=pdl
        )
        # Places are sorted: those of true rows come first, top_k of each.
        numbers, rows = quantise_rows(hidden, group=group, per=top_k, num_rows=num_rows, pdl=pdl)
        parts = grouped_gemm(numbers, w2, tiles, tall, low, scales=(rows, s2), dtype=x.dtype, pdl=pdl)
    return moe_sum_add_norm(parts, routing, residual, norm, eps, keep=keep, num_rows=num_rows, pdl=pdl)
