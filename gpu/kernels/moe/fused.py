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
from gpu.kernels.gemm.quant import quantise_rows
from gpu.kernels.moe.combine import moe_sum_add_norm
from gpu.kernels.moe.few_rows import few_rows_moe
from gpu.kernels.moe.grouped_gemm import down, gate_up
from gpu.kernels.moe.route import route
from gpu.kernels.moe.tuned import MoeConfig
from gpu.kernels.norm import rms_norm


def fused_moe_add_norm(
    x: Tensor,
    logits: Tensor,
    weights: tuple[Tensor, Tensor],
    top_k: int,
    config: MoeConfig,
    after: tuple[Tensor, Tensor, float],
    *,
    renormalise: bool = True,
    scales: tuple[Tensor, Tensor] | None = None,
    num_rows: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """The weighted sum of the best `top_k` experts' gated MLPs, added to the residual and normed.

    x         [T, hidden], contiguous
    logits    [T, experts], contiguous: the router's
    weights   w13 [experts, 2 * width, hidden] (gate over up) and w2 [experts, hidden, width]
    config    from `gpu.kernels.moe.tuned`, for T rows
    after     the residual [T, hidden], updated in place, the next norm's weight [hidden], and eps
    scales    of e4m3 weights: float32 [experts, 2 * width] and [experts, hidden], or those of blocks,
              [experts, 2 * width / 128, hidden / 128] and [experts, hidden / 128, width / 128]
    num_rows  int32 [1] on the device; rows from there on read no expert and are not written
    returns   the normed [T, hidden] in x's dtype
    """
    residual, norm, eps = after
    w13, w2 = weights
    if config.small:
        total, _ = few_rows_moe(
            x, logits, w13, w2, top_k, renormalise=renormalise, scales=scales, num_rows=num_rows, pdl=pdl
        )
        return rms_norm(total, norm, eps, residual=residual, num_rows=num_rows, pdl=pdl)
    routing, tiles = route(logits, top_k, config.block_m, renormalise=renormalise, num_rows=num_rows, pdl=pdl)
    tall, up, low = config.block_m, config.up, config.down
    if scales is None:
        hidden = gate_up(x, w13, tiles, tall, up, pdl=pdl)
        parts = down(hidden, w2, tiles, tall, low, after=up, pdl=pdl)
    else:
        s13, s2 = scales
        group = BLOCK if s13.dim() == w13.dim() else 0
        numbers, rows = quantise_rows(x, group=group, num_rows=num_rows, pdl=pdl)
        hidden = gate_up(numbers, w13, tiles, tall, up, scales=(rows, s13), dtype=x.dtype, pdl=pdl)
        # Places are sorted: those of true rows come first, top_k of each.
        numbers, rows = quantise_rows(hidden, group=group, per=top_k, num_rows=num_rows, pdl=pdl)
        parts = down(numbers, w2, tiles, tall, low, scales=(rows, s2), dtype=x.dtype, pdl=pdl)
    return moe_sum_add_norm(parts, routing, residual, norm, eps, num_rows=num_rows, pdl=pdl)
