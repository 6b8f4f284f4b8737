"""Adapters of an executor, put together: which matrices, how many bytes, where."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from core.adapters import AdapterLimits
from core.errors import ConfigError
from core.models import ModelSpec
from gpu.adapters.pool import AdapterLayout
from gpu.adapters.tiers import AdapterTiers
from gpu.lora import LoraMatrix
from gpu.memory import GIB, available_bytes
from gpu.models.base import CausalModel
from gpu.models.decoder import Decoder
from gpu.shard import ALONE, Shard
from gpu.weights.peft import read_adapter

log = logging.getLogger(__name__)


class Adapting(NamedTuple):
    """Room for adapters of a model, not allocated yet."""

    limits: AdapterLimits
    layout: AdapterLayout
    vocab_size: int

    @property
    def device_bytes(self) -> int:
        """Bytes of all places on the device."""
        return self.limits.places * self.layout.bytes

    def allocate(self, model: CausalModel, device: torch.device) -> AdapterTiers:
        """The memory of both tiers, whose adapters may change `model`. Raises `ConfigError` where the host
        has too little."""
        limits, layout, vocab_size = self
        host = limits.host * layout.bytes
        if host > (left := available_bytes()):
            raise ConfigError(
                f"Not enough memory: {limits.host} adapters of rank {limits.max_rank} take "
                f"{host / GIB:.2f} GiB of the host's, {left / GIB:.2f} GiB is free. "
                "Lower --max-loaded-loras or --max-lora-rank."
            )
        log.info(
            "adapters of up to rank %d: %d on the device (%.2f GiB), %d on the host (%.2f GiB)",
            limits.max_rank,
            limits.places,
            self.device_bytes / GIB,
            limits.host,
            host / GIB,
        )

        def read(path: Path, into: Sequence[LoraMatrix]) -> None:
            read_adapter(path, layout.shapes, limits.targets, into, vocab_size)

        tiers = AdapterTiers(layout, limits, device, read)
        tiers.bind(model.adaptable)
        return tiers


def plan_adapters(
    spec: ModelSpec, limits: AdapterLimits | None, dtype: torch.dtype, shard: Shard = ALONE
) -> Adapting | None:
    """Room for as many as `limits` say, of the rank's part of each. Raises `ConfigError` for a model that
    takes none."""
    if limits is None:
        return None
    if not spec.causal:
        raise ConfigError(f"--enable-lora: {spec.architecture} takes no adapters.")
    if spec.transformers:
        raise ConfigError(
            f"--enable-lora: {spec.architecture} runs through transformers and takes no adapters."
        )
    outline = Decoder(spec, dtype, torch.device("meta"), shard)  # sizes without memory
    layout = AdapterLayout([each.shape for each in outline.adaptable], limits, dtype)
    return Adapting(limits, layout, spec.vocab_size)
