"""The operations as Triton kernels over a captured step.

Launches per layer on a GPU, by plain torch and here, a matrix product counted as one:

                              plain                          fused
    add + norm, twice         4                              2     none for one row: with the products
    products                  4                              4     biases in their epilogue
    head norms                4, where the family has them   -     with rope
    rope, store of K and V    3 + 1                          1
    attention                 2, gather and attend           1     2 up to 4 rows, 3 under cascade
    silu, multiply            2                              1     none up to 64 rows: with gate_up
    ------------------------------------------------------------
    dense layer               16 or 20                       9     8 up to 64 rows, 9 up to 4, 7 for one
    layer of experts          over 40, 5 more for every     10     up to 4 rows, 8 for one
                              expert hit, and a wait        10     up to 64 rows
                                                            11     above

Products of up to 2 or 4 rows, and a router's of up to 32, are `gemv`'s, others of large weights
`skinny_gemm`'s at 3 to 64 rows, and the rest cuBLAS's: it splits K at few rows and sums the parts in a
launch more, and no kernel of its own begins before the last has ended. (Some run by an algorithm that was
measured to be quicker, or of thousands of rows to take less power: `gpu.kernels.gemm.cublaslt`.) On an H200 a
layer of Qwen3-8B over 1,024 keys a row took, in µs by cuBLAS and by `skinny_gemm`, 139 and 121 at 8 rows,
159 and 147 at 32, 193 and 186 at 64; of Qwen3-30B-A3B, without experts, 34 and 30, 47 and 43, 61 and 60.

Products of 4-bit weights (`gpu.kernels.gemm.int4`) are one launch each up to 256 rows. For more rows weights
are turned into 16 bits first, a launch more for each product.

With weights of 8 bits each product (`gpu.ops.scaled`) is preceded by a launch that quantises its rows: 4 more
in a dense layer or one of experts, 2 more in one of experts up to 4 rows.

A layer of experts has 10 launches up to 4 rows; 4 of them are the router, two for the experts, and add +
norm. It has 10 up to 64 rows as well; 5 of them are router, route, gate_up, down, and one that sums, adds and
norms. Above 64 rows route is two launches.

For one row, where `gemv` multiplies, a product also computes the norm of its input, and a product whose
output belongs to the residual adds it there. A router stores the normed rows for its experts. With adapters,
or weights of 4 or 8 bits, add and norm are one launch, as at more rows. On an H200 a step of one row of
Qwen3-30B-A3B takes 4% less, of Qwen3-8B 1.6% (`bench/results/history/h200-one-row-folded-norms.json`).

From 1,024 rows on the products behind attention and a dense MLP are added to the residual in cuBLAS's
epilogue, in float32. The norm then reads and writes half as many bytes. With Qwen3-8B prefill takes 0.9% less
time, c256 0.6% (`bench/results/history/h200-qwen3-8b-residual-epilogue.json`). With a bias, adapters, or
weights of 4 or 8 bits the norm's kernel adds, as at fewer rows.

A norm that stands behind attention or the MLP is one launch, as one before them. Where queries and keys are
normed over all heads together, that is a launch more (plain: 18). gelu by tanh is a launch of its own at any
number of rows; other activations are two of torch's.

A step adds embedding, rotation (plain: 8), first norm and head, one each.

In a step with adapters each product they change has a launch more where `skinny_gemm` multiplies, `shrink`;
elsewhere two, `shrink`, which may run beside it, and `expand`, which has silu with gate and up; each of the
experts' two products has one more, and the step one that sorts its rows by adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from core.errors import ModelError
from gpu.attention.backend import AttentionBackend
from gpu.experts import Experts
from gpu.kernels.attention.latent import latent_store
from gpu.kernels.attention.qk_norm_rope_store import norm_rope_store
from gpu.kernels.attention.rope import rope_rows
from gpu.kernels.gemm.cublaslt import Products
from gpu.kernels.gemm.delta import fits
from gpu.kernels.gemm.gemv import gemv, gemv_config
from gpu.kernels.gemm.int4 import int4_config, int4_gemm, int4_restore
from gpu.kernels.gemm.int4_gemv import int4_gemv, int4_gemv_config
from gpu.kernels.gemm.skinny import skinny_config, skinny_gemm
from gpu.kernels.lora.dense import embed, expand, shrink
from gpu.kernels.lora.linear import Branch, lora_gated, lora_linear, shrink_ahead
from gpu.kernels.moe.few_rows import few_rows_moe
from gpu.kernels.moe.fused import fused_moe, runs_few_rows
from gpu.kernels.moe.tuned import MoeConfigs
from gpu.kernels.norm import add_normed, embed_beside, mean_squares, norm_wide, rms_norm
from gpu.kernels.silu_mul import gelu_mul, silu_mul
from gpu.lora import LoraMatrix, LoraRows
from gpu.ops.base import (
    HeadNorms,
    Input,
    LatentNorm,
    Matrix,
    PairNorms,
    Part,
    PendingExperts,
    PendingNorm,
    PendingProduct,
    Rotation,
    WideNorms,
)
from gpu.ops.plain import gate, merits
from gpu.ops.scaled import scaled_linear
from gpu.quant.rows import Table
from gpu.state.view import StepView

FOLDED_ROWS = 1
"""Maximum rows for which a norm runs in the product that follows it, and the residual is added in the product
before it. Every program norms all rows: with two a step of Qwen3-8B takes 4.81 ms so, and 4.29 with norms in
kernels of their own (Qwen3-30B-A3B 3.24 and 3.26)."""

ADDED_ROWS = 1024
"""Minimum rows for which cuBLAS adds a product to the residual in its epilogue. At 512 rows this saves at
most 2 us a product."""

IN_MEMORY = "tables in files are read on a CPU"
"""Message of an assertion."""


class Kernels(NamedTuple):
    """What the steps of a runner share.

    caches    K and V of every layer, [tokens, kv_heads, head_dim], the pages flattened to tokens
    moe       tile sizes of the experts' shape; None for a dense model
    pdl       programmatic dependent launch: the device has compute capability 9.0
    kv_scales what K and V are divided by before a float8 page takes them; None: pages are not float8
    counters  of `skinny_gemm`; None where a multiprocessor has no room for what it holds
    products  of thousands of rows; None: cuBLAS's own
    branch    where adapters' `shrink` runs beside the base product; None: before it
    """

    attention: AttentionBackend
    caches: Sequence[tuple[Tensor, Tensor]]
    moe: MoeConfigs | None = None
    pdl: bool = False
    kv_scales: tuple[float, float] | None = None
    counters: Tensor | None = None
    products: Products | None = None
    branch: Branch | None = None


class TritonOps:
    """`Ops` of one graph. Nothing here waits for the device, reads from it or depends on its data.

    Owner: launch thread, while a graph is captured or a step runs eagerly.
    """

    def __init__(self, view: StepView, kernels: Kernels, samples: bool = False) -> None:
        """Operations of the view's tokens, or of its `samples`."""
        self._view = view
        self._kernels = kernels
        self.num_rows = view.counts[3:4] if samples else view.num_tokens
        self.pdl = kernels.pdl
        self._adapters: LoraRows | None = None
        if view.adapters is not None:
            self._adapters = view.adapters.samples if samples else view.adapters.tokens

    @property
    def adapts(self) -> bool:
        """Whether rows may have adapters."""
        return self._adapters is not None

    def for_samples(self) -> TritonOps:
        """See `Ops.for_samples`."""
        return TritonOps(self._view, self._kernels, samples=True)

    def embed(self, table: Table, ids: Tensor, lora: LoraMatrix | None = None) -> Tensor:
        """See `Ops.embed`. Padded ids are in bounds, and their rows unused."""
        assert isinstance(table, Tensor), IN_MEMORY
        found = torch.index_select(table, 0, ids)
        if lora is not None and self._adapters is not None:
            embed(ids, lora, self._adapters, found, pdl=self._kernels.pdl)
        return found

    def embed_beside(self, table: Table, ids: Tensor, hidden: Tensor, norms: PairNorms | None) -> Tensor:
        """See `Ops.embed_beside`: one launch."""
        assert isinstance(table, Tensor), IN_MEMORY
        weights, eps = (None, 0.0) if norms is None else (norms[:2], norms[2])
        rows, pdl = self.num_rows, self._kernels.pdl
        return embed_beside(table, ids, hidden, weights, eps, num_rows=rows, pdl=pdl)

    def rotation(self, positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> Rotation:
        """See `Ops.rotation`."""
        rows, pdl = self.num_rows, self._kernels.pdl
        return Rotation(*rope_rows(positions, frequencies, scale, dtype, num_rows=rows, pdl=pdl))

    def add_rms_norm(
        self, part: Part | None, residual: Tensor, weight: Tensor, eps: float, keep: Tensor | None = None
    ) -> Tensor:
        """See `Ops.add_rms_norm`. Experts that are pending run now, their sum in the kernel of the norm."""
        if self._added(part, residual):
            part = None
        if isinstance(part, PendingExperts):
            return self._run_experts(part, (residual, weight, eps), keep)
        rows, pdl = self.num_rows, self._kernels.pdl
        if part is None:
            return rms_norm(residual, weight, eps, keep=keep, num_rows=rows, pdl=pdl)
        made = self.complete(part)
        return rms_norm(made, weight, eps, residual=residual, keep=keep, num_rows=rows, pdl=pdl)

    def add_then_norm(
        self, part: Part | None, residual: Tensor, weight: Tensor, eps: float, keep: Tensor | None = None
    ) -> Input:
        """See `Ops.add_then_norm`. With one row it launches no kernel: the product before it adds to the
        residual, and the product after it computes the norm."""
        if keep is None and len(residual) <= FOLDED_ROWS and (part is None or self._added(part, residual)):
            return PendingNorm(residual, weight, eps)
        return self.add_rms_norm(part, residual, weight, eps, keep)

    def _added(self, part: Part | None, residual: Tensor) -> bool:
        """Run `part` in a kernel that adds it to `residual`. False, with nothing run, where no kernel does
        that."""
        if len(residual) >= ADDED_ROWS and isinstance(part, PendingProduct):
            return self._added_by_cublas(part, residual)
        if len(residual) > FOLDED_ROWS:
            return False
        if isinstance(part, PendingProduct):
            return self._gemv(part.x, part.matrix, residual=residual) is not None
        if not isinstance(part, PendingExperts) or part.beside is not None:
            return False
        x, logits, experts, _ = part
        configs = self._kernels.moe
        assert configs is not None, "experts in a model without"
        if not runs_few_rows(experts, configs.at(len(logits)), self._adapters):
            return False
        few_rows_moe(x, logits, experts, residual=residual, num_rows=self.num_rows, pdl=self.pdl)
        return True

    def _added_by_cublas(self, part: PendingProduct, residual: Tensor) -> bool:
        """Like `_added`, for a product of many rows."""
        weight, bias, scale, lora = part.matrix
        if bias is not None or scale is not None or (lora is not None and self.adapts):
            return False
        residual.addmm_(part.x, weight.t())
        return True

    def _gemv(
        self,
        x: Input,
        matrix: Matrix,
        *,
        gated: bool = False,
        residual: Tensor | None = None,
        normed: Tensor | None = None,
    ) -> Tensor | None:
        """Multiply by `gemv`; None where another kernel multiplies this matrix. A pending norm of `x` runs
        in the same kernel, which stores the normed rows in `normed` and adds the product to `residual` where
        given."""
        weight, bias, scale, lora = matrix
        rows, norm = (x.x, x[1:]) if isinstance(x, PendingNorm) else (x, None)
        if scale is not None or (lora is not None and self.adapts):
            return None
        if (cut := gemv_config(len(rows), weight, gated)) is None:
            return None
        return gemv(
            rows, weight, bias, cut, gated=gated, norm=norm, residual=residual, normed=normed, pdl=self.pdl
        )

    def add_normed(self, part: Part, residual: Tensor, weight: Tensor, eps: float) -> None:
        """See `Ops.add_normed`: one launch."""
        rows, pdl = self.num_rows, self._kernels.pdl
        add_normed(self.complete(part), residual, weight, eps, num_rows=rows, pdl=pdl)

    def mean_squares(self, qkv: Tensor, norms: WideNorms) -> Tensor:
        """See `Ops.mean_squares`: one launch."""
        sizes, pdl = (len(norms[0]), len(norms[1])), self._kernels.pdl
        return mean_squares(qkv, sizes, num_rows=self.num_rows, pdl=pdl)

    def norm_wide(self, qkv: Tensor, norms: WideNorms, means: Tensor | None = None) -> None:
        """See `Ops.norm_wide`: one launch."""
        norm_wide(qkv, norms, means, num_rows=self.num_rows, pdl=self._kernels.pdl)

    def complete(self, pending: Part | Input) -> Tensor:
        """See `Ops.complete`."""
        if isinstance(pending, PendingExperts):
            return self._run_experts(pending, None, None)
        if isinstance(pending, PendingProduct):
            return self.linear(pending.x, pending.matrix)
        if isinstance(pending, PendingNorm):
            return self.add_rms_norm(None, *pending)
        return pending

    def _run_experts(
        self, part: PendingExperts, after: tuple[Tensor, Tensor, float] | None, keep: Tensor | None
    ) -> Tensor:
        configs = self._kernels.moe
        assert configs is not None, "experts in a model without"
        rows, pdl, (x, logits, experts, beside) = self.num_rows, self.pdl, part
        config, adapters = configs.at(len(logits)), self._adapters
        own = after if beside is None else None
        made = fused_moe(
            x, logits, experts, config, own, keep=keep, adapters=adapters, num_rows=rows, pdl=pdl
        )
        if beside is None:
            return made
        made.add_(beside)
        return made if after is None else self.add_rms_norm(made, *after, keep)

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        heads: tuple[int, int],
        rotation: Rotation,
        norms: HeadNorms | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `Ops.attend`. The queries leave `qkv`, so that a backend gets them without gaps."""
        view, kernels = self._view, self._kernels
        q_heads, kv_heads = heads
        q = norm_rope_store(
            qkv,
            kernels.caches[layer],
            view.kv_slot_mapping,
            rotation,
            norms,
            q_out=qkv.new_empty(len(qkv), qkv.shape[1] // (q_heads + 2 * kv_heads) * q_heads),
            scales=kernels.kv_scales or (1.0, 1.0),
            num_rows=self.num_rows,
            pdl=kernels.pdl,
        )
        return kernels.attention.attend(layer, q, view, sinks)

    def attend_latent(
        self, layer: int, q: Tensor, turned: Tensor, kv: Tensor, rotation: Rotation, norm: LatentNorm
    ) -> Tensor:
        """See `Ops.attend_latent`: one launch, and attention."""
        view, kernels, (weight, eps, interleaved) = self._view, self._kernels, norm
        cache, where, rows, pdl = kernels.caches[layer][0], view.kv_slot_mapping, self.num_rows, self.pdl
        latent_store(
            q, turned, kv, cache, where, rotation, (weight, eps), interleaved, num_rows=rows, pdl=pdl
        )
        return kernels.attention.attend(layer, q, view)

    def store(
        self, layer: int, kv: Tensor, kv_heads: int, rotation: Rotation, norms: HeadNorms | None
    ) -> None:
        """See `Ops.store`: `attend`'s kernel without queries."""
        kernels = self._kernels
        norm_rope_store(
            kv,
            kernels.caches[layer],
            self._view.kv_slot_mapping,
            rotation,
            norms,
            scales=kernels.kv_scales or (1.0, 1.0),
            num_rows=self.num_rows,
            pdl=kernels.pdl,
        )

    def linear(self, x: Input, matrix: Matrix) -> Tensor:
        """See `Ops.linear`."""
        if isinstance(x, PendingNorm):
            if (found := self._gemv(x, matrix)) is not None:
                return found
            x = self.complete(x)
        kernels, product = self._kernels, partial(self._linear, x, matrix, gated=False)
        if matrix.lora is None or self._adapters is None:
            return product()
        if (found := self._skinny_with_delta(x, matrix, self._adapters, gated=False)) is not None:
            return found
        return lora_linear(x, matrix.lora, self._adapters, kernels.branch, product, pdl=kernels.pdl)

    def add_lora(self, x: Tensor, lora: LoraMatrix | None, y: Tensor) -> Tensor:
        """See `Ops.add_lora`."""
        if lora is not None and self._adapters is not None:
            pdl = self._kernels.pdl
            expand(shrink(x, lora, self._adapters, pdl=pdl), lora, self._adapters, y, pdl=pdl)
        return y

    def gated_linear(self, x: Input, matrix: Matrix, activation: str) -> Tensor:
        """See `Ops.gated_linear`; up to 64 rows in one kernel. With adapters silu is `expand`'s."""
        if activation != "silu":
            return self.gate(self.linear(x, matrix), activation)
        if isinstance(x, PendingNorm):
            if (made := self._gemv(x, matrix, gated=True)) is not None:
                return made
            x = self.complete(x)
        if matrix.lora is None or self._adapters is None:
            return self._linear(x, matrix, gated=True)
        if (found := self._skinny_with_delta(x, matrix, self._adapters, gated=True)) is not None:
            return found
        kernels, product = self._kernels, partial(self._linear, x, matrix, gated=False)
        return lora_gated(
            x, matrix.lora, self._adapters, kernels.branch, product, num_rows=self.num_rows, pdl=kernels.pdl
        )

    def gate(self, both: Tensor, activation: str) -> Tensor:
        """See `Ops.gate`."""
        if activation == "silu":
            return silu_mul(both, num_rows=self.num_rows, pdl=self._kernels.pdl)
        if activation == "gelu_pytorch_tanh":
            return gelu_mul(both, num_rows=self.num_rows, pdl=self._kernels.pdl)
        return gate(both, activation)

    def _linear(self, x: Tensor, matrix: Matrix, *, gated: bool) -> Tensor:
        return multiply(x, matrix, self._kernels, gated=gated, num_rows=self.num_rows)

    def _skinny_with_delta(
        self, x: Tensor, matrix: Matrix, adapters: LoraRows, *, gated: bool
    ) -> Tensor | None:
        """The product with the deltas in its epilogue; None where another kernel multiplies."""
        kernels, pdl, (weight, bias, scale, lora) = self._kernels, self._kernels.pdl, matrix
        few = scale is not None or gemv_config(len(x), weight, gated) is not None
        cut = None if few else skinny_config(len(x), weight, gated)
        if kernels.counters is None or cut is None or lora is None or not fits(lora, cut.block_n):
            return None
        delta = shrink_ahead(x, lora, adapters, pdl=pdl)
        return skinny_gemm(x, weight, bias, cut, kernels.counters, gated=gated, delta=delta, pdl=pdl)

    def router_logits(self, x: Input, matrix: Matrix) -> tuple[Tensor, Tensor]:
        """See `Ops.router_logits`."""
        if isinstance(x, PendingNorm):
            normed = torch.empty_like(x.x)
            if (logits := self._gemv(x, matrix, normed=normed)) is not None:
                return logits, normed
            x = self.complete(x)
        return self.linear(x, matrix), x

    def experts(self, x: Tensor, logits: Tensor, experts: Experts) -> Part:
        """See `Ops.experts`. Raises `ModelError` for an activation the grouped kernels do not have."""
        if experts.activation != "silu":
            raise ModelError(f"Experts with {experts.activation} do not run on a GPU: use --device cpu.")
        return PendingExperts(x, logits, experts)

    def routes(self, logits: Tensor, experts: Experts) -> Tensor:
        """See `Ops.routes`. As the kernels order them: by logit, the lowest expert first on ties, which
        bfloat16 has many of and `topk` breaks as it likes. Only steps whose routing is reported run it."""
        scores = logits.float().sigmoid() if experts.choice.sigmoid else logits.float()
        ordered = merits(scores, experts.choice).sort(dim=-1, descending=True, stable=True)
        return ordered.indices[:, : experts.top_k]


def multiply(
    x: Tensor, matrix: Matrix, kernels: Kernels, *, gated: bool = False, num_rows: Tensor | None = None
) -> Tensor:
    """x Wᵀ + b as `Ops.linear` without adapters; `gated`: silu(first half) · second half of it. `num_rows`
    int32 [1] on the device, how many rows are true."""
    pdl, (weight, bias, scale, _) = kernels.pdl, matrix
    if scale is not None:
        if not matrix.is_int4:
            return scaled_linear(x, matrix, kernels.counters, gated=gated, num_rows=num_rows, pdl=pdl)
        if (one := int4_gemv_config(len(x), weight, scale, gated)) is not None:
            return int4_gemv(x, weight, scale, bias, one, gated=gated, pdl=pdl)
        if (fine := int4_config(len(x), weight, scale, gated, kernels.counters is not None)) is not None:
            return int4_gemm(x, weight, scale, bias, fine, kernels.counters, gated=gated, pdl=pdl)
        weight = int4_restore(weight, scale, pdl=pdl)
    if (few := gemv_config(len(x), weight, gated)) is not None:
        return gemv(x, weight, bias, few, gated=gated, pdl=pdl)
    skinny = skinny_config(len(x), weight, gated)
    if kernels.counters is not None and skinny is not None:
        return skinny_gemm(x, weight, bias, skinny, kernels.counters, gated=gated, pdl=pdl)
    out = cublas_gemm(x, weight, bias, kernels.products)
    return silu_mul(out, num_rows=num_rows, pdl=pdl) if gated else out


def cublas_gemm(x: Tensor, weight: Tensor, bias: Tensor | None, products: Products | None = None) -> Tensor:
    """x Wᵀ + b by cuBLAS."""
    found = products.run(x, weight) if products is not None and bias is None else None
    return F.linear(x, weight, bias) if found is None else found
