"""The operations between a decoder's matrix products, as a protocol.

Cut where kernels can be fused, not where the arithmetic is: a set of operations may do each in one
kernel or in ten, and the layers read the same. Products with weights that were packed for a CPU are not
here: the layer has them.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from gpu.experts import Experts
from gpu.lora import LoraMatrix
from gpu.quant.rows import Table


class Rotation(NamedTuple):
    """cos and sin [n, 1, rotary_dim] of a step's positions; `sin` is negative in its first half."""

    cos: Tensor
    sin: Tensor


class Matrix(NamedTuple):
    """A matrix for products x Wᵀ + b: `weight` [outputs, inputs] contiguous, `bias` [outputs].

    With a `scale` the weight is e4m3 or int8, and `x` is quantised to the same: with float32 [outputs] by
    row, of e4m3 with [outputs / 128, inputs / 128] by groups of 128 (`gpu.quant.scaled`); or it has 4 bits,
    int16 [outputs, inputs / 4] with a scale [inputs / group, outputs, 2] in x's dtype (`gpu.quant.int4`).
    int8 on a CPU may also be of `gpu.quant.int8`, which its layer packs and multiplies. `lora` is what
    adapters add to it, in steps with adapters.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None
    lora: LoraMatrix | None = None

    @property
    def is_int4(self) -> bool:
        """Whether the weight has 4 bits."""
        return self.weight.dtype == torch.int16


class PendingExperts(NamedTuple):
    """Experts of `x` [n, hidden] by router `logits` [n, experts], not yet run: the norm that
    consumes their sum runs them, and sums their parts in its own kernel. `beside` [n, hidden] is a rank's
    part of the shared expert's output, which is added to the sum."""

    x: Tensor
    logits: Tensor
    experts: Experts
    beside: Tensor | None = None


class PendingProduct(NamedTuple):
    """A product x Wᵀ + b of `x` [n, inputs] that has not run yet. With one row its kernel adds it to the
    residual."""

    x: Tensor
    matrix: Matrix


class PendingNorm(NamedTuple):
    """An RMSNorm of `x` [n, hidden] by `weight` and `eps` that has not run yet. With one row each product
    that reads it computes it in its own kernel."""

    x: Tensor
    weight: Tensor
    eps: float


Part = Tensor | PendingExperts | PendingProduct
"""What a layer adds to the residual: [n, hidden], or what becomes it."""

Input = Tensor | PendingNorm
"""What a layer's products multiply: [n, hidden], or what becomes it."""

HeadNorms = tuple[Tensor, Tensor, float]
"""Weights [head_dim] of the query and the key norm, and eps."""

WideNorms = tuple[Tensor, Tensor, float]
"""Weights of query and key norms over all heads together, [heads * head_dim] and [kv_heads * head_dim], and
eps."""

PairNorms = tuple[Tensor, Tensor, float]
"""Weights [hidden] of the norms of an embedding and of the hidden state beside it, and eps."""


class LatentNorm(NamedTuple):
    """How a token's latent and shared key are prepared for the pages: RMSNorm of the latent, `weight`
    [kv_rank] and `eps`, and whether rope of the key is interleaved (neighbouring dimensions rotate together).
    """

    weight: Tensor
    eps: float
    interleaved: bool


class Ops(Protocol):
    """Owner: launch thread, for one step. n rows; those behind a step's true rows may hold anything."""

    def for_samples(self) -> Ops:
        """These operations for rows that stand for the step's samples, not for its tokens; they do not
        attend."""
        ...

    def embed(self, table: Table, ids: Tensor, lora: LoraMatrix | None = None) -> Tensor:
        """Rows of `table` [vocab, hidden], which on a CPU may be in a file, with what adapters add: a new
        [n, hidden], which becomes the residual."""
        ...

    def embed_beside(self, table: Table, ids: Tensor, hidden: Tensor, norms: PairNorms | None) -> Tensor:
        """Rows of `table` [vocab, hidden] beside `hidden` [n, hidden], each normed where `norms` are given: a
        new [n, 2 * hidden]."""
        ...

    def rotation(self, positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> Rotation:
        """cos and sin of positions [n] times `frequencies` float32 [rotary_dim / 2], times `scale`."""
        ...

    def add_rms_norm(
        self, part: Part | None, residual: Tensor, weight: Tensor, eps: float, keep: Tensor | None = None
    ) -> Tensor:
        """Add `part`, if any, to `residual` [n, hidden] in place and norm the sum: a new [n, hidden],
        x / sqrt(mean(x²) + eps) · weight. The sum is also stored in `keep` [n, hidden], whose rows may be
        strided."""
        ...

    def add_then_norm(
        self, part: Part | None, residual: Tensor, weight: Tensor, eps: float, keep: Tensor | None = None
    ) -> Input:
        """Like `add_rms_norm`, for `linear`, `gated_linear` and `router_logits`, which may run the norm."""
        ...

    def complete(self, pending: Part | Input) -> Tensor:
        """Run what is pending: a tensor [n, hidden]."""
        ...

    def add_normed(self, part: Part, residual: Tensor, weight: Tensor, eps: float) -> None:
        """Norm `part` and add it to `residual` [n, hidden] in place."""
        ...

    def mean_squares(self, qkv: Tensor, norms: WideNorms) -> Tensor:
        """Mean squares of all queries of a row, and of all its keys: float32 [n, 2]. `qkv` as `attend` takes
        it."""
        ...

    def norm_wide(self, qkv: Tensor, norms: WideNorms, means: Tensor | None = None) -> None:
        """Norm queries and keys in place, each over all heads together: by `means`, or by `mean_squares`."""
        ...

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        heads: tuple[int, int],
        rotation: Rotation,
        norms: HeadNorms | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Norm and rotate heads, store K and V in their pages, attend: [n, heads * head_dim].

        `qkv` [n, (heads + 2 * kv_heads) * head_dim] holds queries, keys, values and is used up;
        `heads` is (heads, kv_heads); `sinks` [heads] are scores of a key more, which has no value.
        """
        ...

    def store(
        self, layer: int, kv: Tensor, kv_heads: int, rotation: Rotation, norms: HeadNorms | None
    ) -> None:
        """Norm and rotate keys and store them and values in their pages, as `attend` does. `kv`
        [n, 2 * kv_heads * head_dim], whose rows may be strided, is used up."""
        ...

    def attend_latent(
        self, layer: int, q: Tensor, turned: Tensor, kv: Tensor, rotation: Rotation, norm: LatentNorm
    ) -> Tensor:
        """Attention over latents: [n, heads * kv_rank].

        `q` [n, heads, kv_rank + rope_dim] contiguous: queries of the latents in front, and behind them the
        place for `turned` [n, heads, rope_dim], rows and heads strided, which is rotated into it. `kv` [n,
        kv_rank + rope_dim], a latent and a shared key, is normed, rotated and stored in its page; it is used
        up, and so is `turned`.
        """
        ...

    def linear(self, x: Input, matrix: Matrix) -> Tensor:
        """x Wᵀ + b of `x` contiguous [n, inputs], in x's dtype: [n, outputs]."""
        ...

    def add_lora(self, x: Tensor, lora: LoraMatrix | None, y: Tensor) -> Tensor:
        """`y` [n, outputs], the product of `x` by a matrix without adapters, with what these add, in place.
        Nothing in a step without."""
        ...

    def gated_linear(self, x: Input, matrix: Matrix, activation: str) -> Tensor:
        """activation(first half) · second half of the 2 * width outputs of `linear`: [n, width]."""
        ...

    def gate(self, both: Tensor, activation: str) -> Tensor:
        """activation(first half) · second half of `both` [n, 2 * width]: [n, width]."""
        ...

    def router_logits(self, x: Input, matrix: Matrix) -> tuple[Tensor, Tensor]:
        """Return the logits [n, experts] of `x` by the router's `matrix`, and `x` as `experts` takes it."""
        ...

    def experts(self, x: Tensor, logits: Tensor, experts: Experts) -> Part:
        """The weighted sum of the best experts' gated MLPs."""
        ...

    def routes(self, logits: Tensor, experts: Experts) -> Tensor:
        """Which experts `experts` runs for each row of `logits` [n, experts], best first: integers
        [n, top_k]."""
        ...
