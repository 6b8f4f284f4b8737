"""A product with its adapters: `expand` in its epilogue, or `shrink` beside it and `expand` behind both.

Where `skinny_gemm` multiplies, up to 64 rows, it adds the deltas itself:

    norm ── shrink ── product + expand

and begins when `shrink` does, which is hidden behind it. What else multiplies has no such epilogue. There
`shrink` and the base product, which need nothing of each other, stand on two branches of the graph:

    norm ─┬─ product ─┬─ expand
          └─ shrink  ─┘

Dependent launch orders kernels of one branch only: the first of the second branch and the one behind the join
are launched without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from gpu.kernels.gemm.delta import Delta, DeltaShape, delta_shape
from gpu.kernels.lora.dense import expand, expand_silu, lora_config, shrink
from gpu.lora import LoraMatrix, LoraRows

MOST_PARTS = 4
"""Maximum number of partial sums that an epilogue adds. Each of its programs reads all of them, and the
product fills most SMs, which leaves room for some 36 other programs."""

T = TypeVar("T")
_cuda: Any = torch.cuda  # parts of it are untyped


class Branch:
    """A second branch of a graph while one is captured; else calls are run as they are.

    Owner: launch thread. What `run` reads and returns must be held until `join`.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = _cuda.Stream(device) if device.type == "cuda" else None
        self._open = False

    def run(self, work: Callable[[], T]) -> T:
        """Run `work` behind what the stream has so far, beside what follows up to `join`."""
        if self._stream is None or not torch.cuda.is_current_stream_capturing():
            return work()
        self._stream.wait_stream(torch.cuda.current_stream())
        self._open = True
        with torch.cuda.stream(self._stream):
            return work()

    def join(self) -> None:
        """Make what follows wait for `run`."""
        if self._open:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._open = False


def shrink_ahead(
    x: Tensor, lora: LoraMatrix, rows: LoraRows, *, pdl: bool = False
) -> tuple[Delta, DeltaShape]:
    """The delta that `skinny_gemm` of `x`, launched next, adds."""
    cut = lora_config(len(x), lora)
    h = shrink(x, lora, rows, config=cut._replace(parts=min(cut.parts, MOST_PARTS)), pdl=pdl)
    return Delta(h, lora.b, lora.ranks, rows), delta_shape(lora, len(h))


def lora_linear(
    x: Tensor,
    lora: LoraMatrix,
    rows: LoraRows,
    branch: Branch | None,
    product: Callable[[], Tensor],
    *,
    pdl: bool = False,
) -> Tensor:
    """`product()`, x Wᵀ + b [n, outputs] of contiguous `x` [n, inputs], with the delta of each row's adapter
    added in place. Without `branch` all kernels follow each other."""
    h, y = _beside(x, lora, rows, branch, product, pdl)
    expand(h, lora, rows, y, pdl=pdl, joined=branch is not None)
    return y


def lora_gated(
    x: Tensor,
    lora: LoraMatrix,
    rows: LoraRows,
    branch: Branch | None,
    product: Callable[[], Tensor],
    *,
    num_rows: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Like `lora_linear`, for a fused gate and up product [n, 2 * width], with silu(g) · u: a new [n, width].
    `num_rows` as for `expand_silu`."""
    h, both = _beside(x, lora, rows, branch, product, pdl)
    return expand_silu(h, lora, rows, both, num_rows=num_rows, pdl=pdl, joined=branch is not None)


def _beside(
    x: Tensor,
    lora: LoraMatrix,
    rows: LoraRows,
    branch: Branch | None,
    product: Callable[[], Tensor],
    pdl: bool,
) -> tuple[Tensor, Tensor]:
    """What `shrink` and `product` find. The kernels are the same whether a graph is captured or not, so that
    none is compiled during a capture."""
    if branch is None:
        return shrink(x, lora, rows, pdl=pdl), product()
    h = branch.run(lambda: shrink(x, lora, rows))
    y = product()
    branch.join()
    return h, y
