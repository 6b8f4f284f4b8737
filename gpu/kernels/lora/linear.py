"""A product with its adapters: `shrink` beside it, `expand` behind both.

`shrink` and the base product read the same rows and need nothing of each other. In a graph they stand on two
branches, so that what `shrink` takes is hidden behind the product, which takes longer:

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

from gpu.kernels.lora.dense import expand, expand_silu, shrink
from gpu.lora import LoraMatrix, LoraRows

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
        """What follows waits for `run`."""
        if self._open:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._open = False


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
    """The same of a fused gate and up product [n, 2 * width], with silu(g) · u: a new [n, width]. `num_rows`
    as for `expand_silu`."""
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
