"""The operations of a CPU in float32, by kernels that are compiled where they run."""

from __future__ import annotations

import torch
from torch import Tensor

from core.errors import ConfigError
from core.models import ModelSpec
from gpu.attention.cpu_paged import CpuAttention
from gpu.attention.registry import parse_backends
from gpu.kernels.cpu import GROUP, TURNED, WIDTH, Heads, Kernels, kernels
from gpu.lora import LoraRows
from gpu.ops.base import HeadNorms, Part, Rotation
from gpu.ops.plain import TorchOps
from gpu.state.view import StepView


def fits(spec: ModelSpec, dtype: torch.dtype) -> bool:
    """Whether the kernels compute a model's layers."""
    turned = int(spec.head_dim * spec.rope.partial)
    return (
        dtype == torch.float32
        and spec.causal
        and spec.latent is None
        and spec.linear is None
        and not (spec.attention_cap or spec.sinks)
        and spec.hidden % WIDTH == spec.head_dim % WIDTH == turned % TURNED == 0
        and spec.heads // spec.kv_heads <= GROUP
    )


def choose_cpu_kernels(spec: ModelSpec, dtype: torch.dtype, wanted: str) -> Kernels | None:
    """The kernels that `--attention-backend` asks for: by default all that there are. Raises
    `ConfigError`."""
    if (name := parse_backends(wanted)["decode"]) == "torch":
        return None
    own = kernels() if fits(spec, dtype) else None
    if own is None and name == "cpu":
        raise ConfigError(
            "--attention-backend decode=cpu needs gcc, an x86 CPU with AVX2, and a model in float32 without "
            "latents, linear attention, attention sinks and a cap of scores: use decode=torch."
        )
    return own


class CpuOps(TorchOps):
    """`Ops` of a model that `fits`. Owner: launch thread, for one step."""

    def __init__(self, view: StepView, attention: CpuAttention, rows: LoraRows | None = None) -> None:
        """`rows` as in `TorchOps`."""
        super().__init__(view, attention, rows)
        self._paged, self._kernels = attention, attention.kernels

    def for_samples(self) -> CpuOps:
        """See `Ops.for_samples`."""
        adapters = self._view.adapters
        return self if adapters is None else CpuOps(self._view, self._paged, adapters.samples)

    def add_rms_norm(
        self, part: Part | None, residual: Tensor, weight: Tensor, eps: float, keep: Tensor | None = None
    ) -> Tensor:
        """See `Ops.add_rms_norm`."""
        added = None if part is None else self.complete(part).contiguous()
        return self._kernels.rms_norm(added, residual, weight, eps, keep)

    def gate(self, both: Tensor, activation: str) -> Tensor:
        """See `Ops.gate`."""
        if activation != "silu" or both.shape[1] % (2 * WIDTH):
            return super().gate(both, activation)
        return self._kernels.silu_mul(both)

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        heads: tuple[int, int],
        rotation: Rotation,
        norms: HeadNorms | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `Ops.attend`."""
        queries, keys = heads
        q = qkv.view(len(qkv), queries + 2 * keys, -1)
        sizes, cache = Heads(queries, keys, q.shape[2]), self._paged.cache(layer)
        self._kernels.store_kv(qkv, sizes, rotation, norms, cache, self._view.kv_slot_mapping)
        return self._paged.attend(layer, q[:, :queries], self._view)
