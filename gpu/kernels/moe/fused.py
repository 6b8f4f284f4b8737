"""A layer's routed experts from router logits to their sum: which kernels, in which order.

up to a few rows    small_moe                                           2 launches
up to 128 rows      choose, sort, gate_up, down, moe_sum                5
above               route, scatter, gate_up, down, moe_sum              5

FP8 weights multiply rows that are quantised first, 2 launches more; `small_moe` widens them instead, since
reading them is its time.
"""

from __future__ import annotations

from torch import Tensor

from core.models.quant import BLOCK
from gpu.kernels.gemm.quant import quantise_rows
from gpu.kernels.moe.combine import moe_sum, moe_sum_add_norm
from gpu.kernels.moe.few_rows import small_moe
from gpu.kernels.moe.grouped_gemm import down, gate_up
from gpu.kernels.moe.route import Routing, route
from gpu.kernels.moe.tuned import MoeConfig
from gpu.kernels.norm import add_rms_norm


def _parts(
    x: Tensor,
    logits: Tensor,
    weights: tuple[Tensor, Tensor],
    top_k: int,
    config: MoeConfig,
    renormalise: bool,
    num_rows: Tensor | None,
    scales: tuple[Tensor, Tensor] | None,
    pdl: bool,
) -> tuple[Tensor, Routing]:
    """The output of every (row, expert) pair, [T * k, hidden], and who went where."""
    w13, w2 = weights
    routing, tiles = route(logits, top_k, config.block_m, renormalise=renormalise, num_rows=num_rows, pdl=pdl)
    tall, up, low = config.block_m, config.up, config.down
    if scales is None:
        hidden = gate_up(x, w13, tiles, tall, up, pdl=pdl)
        return down(hidden, w2, tiles, tall, low, after=up, pdl=pdl), routing
    s13, s2 = scales
    group = BLOCK if s13.dim() == w13.dim() else 0
    numbers, rows = quantise_rows(x, group=group, num_rows=num_rows, pdl=pdl)
    hidden = gate_up(numbers, w13, tiles, tall, up, scales=(rows, s13), dtype=x.dtype, pdl=pdl)
    # Places are sorted: those of true rows come first, top_k of each.
    numbers, rows = quantise_rows(hidden, group=group, per=top_k, num_rows=num_rows, pdl=pdl)
    return down(numbers, w2, tiles, tall, low, scales=(rows, s2), dtype=x.dtype, pdl=pdl), routing


def fused_moe(
    x: Tensor,
    logits: Tensor,
    weights: tuple[Tensor, Tensor],
    top_k: int,
    config: MoeConfig,
    *,
    renormalise: bool = True,
    scales: tuple[Tensor, Tensor] | None = None,
    num_rows: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Weighted sum of the best `top_k` experts' gated MLPs.

    x         [T, hidden], contiguous
    logits    [T, experts], contiguous: the router's
    weights   w13 [experts, 2 * width, hidden] (gate over up) and w2 [experts, hidden, width]
    config    from `gpu.kernels.moe.tuned`, for T rows
    scales    of e4m3 weights: float32 [experts, 2 * width] and [experts, hidden], or those of blocks,
              [experts, 2 * width / 128, hidden / 128] and [experts, hidden / 128, width / 128]
    num_rows  int32 [1] on the device; rows from there on read no expert and are not written
    returns   [T, hidden] in x's dtype
    """
    if config.small:
        w13, w2 = weights
        return small_moe(
            x, logits, w13, w2, top_k, renormalise=renormalise, scales=scales, num_rows=num_rows, pdl=pdl
        )[0]
    parts, routing = _parts(x, logits, weights, top_k, config, renormalise, num_rows, scales, pdl)
    return moe_sum(parts, routing, num_rows=num_rows, pdl=pdl)


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
    """`fused_moe`, then the next layer's add and norm in the kernel that sums the experts.

    `after` is the residual [T, hidden], updated in place, the norm's weight [hidden], and eps. Returns
    the normed [T, hidden].
    """
    residual, weight, eps = after
    if config.small:
        w13, w2 = weights
        total, _ = small_moe(
            x, logits, w13, w2, top_k, renormalise=renormalise, scales=scales, num_rows=num_rows, pdl=pdl
        )
        return add_rms_norm(total, residual, weight, eps, num_rows=num_rows, pdl=pdl)
    parts, routing = _parts(x, logits, weights, top_k, config, renormalise, num_rows, scales, pdl)
    return moe_sum_add_norm(parts, routing, residual, weight, eps, num_rows=num_rows, pdl=pdl)
