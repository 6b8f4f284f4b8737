"""A GPU's runner, put together. Imports Triton, so only `gpu.build` loads it, and only for a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from core.config import CacheConfig, ModelConfig, ScheduleConfig
from core.models import ModelSpec
from gpu.attention.backend import AttentionOptions, Caches, attention_facts
from gpu.attention.registry import device_attention
from gpu.device import HOPPER, CudaFacts
from gpu.kernels.gemm.cublaslt import products
from gpu.kernels.gemm.skinny import mid_counters
from gpu.kernels.moe.tuned import MoeConfigs, MoeShape, weight_name
from gpu.kernels.sampling import kernels as triton_kernels
from gpu.kv.pool import KvPool
from gpu.layers.moe import expert_scales
from gpu.memory import page_dtype
from gpu.models.base import CausalModel
from gpu.ops.fused import Kernels
from gpu.parts import Parts
from gpu.state.entry import CASCADE_ROWS
from gpu.step.graphs import CudaGraphs, Plain
from gpu.step.runner import GraphRunner, Machine, Shape

MAX_CHUNKS = 64
"""Chunks of a step. Attention's grid has room for a partial block of each: at 512, programs that find no
work were reckoned to take 9 µs a layer."""


def captured_runner(
    parts: Parts,
    settings: tuple[ModelConfig, CacheConfig, ScheduleConfig],
    loaded: CausalModel,
    pool: KvPool,
    progress: Callable[[str, float], None],
) -> GraphRunner:
    """All graphs captured, ready for plans. Raises `ConfigError` for an attention backend that is not to
    be had."""
    model, cache, schedule = settings
    spec, (device, dtype, facts), sizes = parts.spec, parts.target, parts.sizes
    pdl = facts.capability >= HOPPER
    attends = attention_facts(spec, cache.page_size, sizes.rows, dtype, device)
    if page_dtype(cache, dtype).itemsize == 1:
        # A checkpoint's own are not read yet. At 1 e4m3 has its three bits from 2^-6 to 448, and saturates.
        attends = attends._replace(kv_scales=((1.0, 1.0),) * spec.layers)
    attention = device_attention(attends, AttentionOptions(pdl, CASCADE_ROWS), model.attention_backend)
    experts, many = _experts(spec, dtype, facts), products(facts.name, device)

    def kernels(caches: Caches) -> Kernels:
        counters = mid_counters(device) if pdl else None  # pdl's devices have the room, too
        return Kernels(attention, caches, experts, pdl, attends.kv_scales, counters, many)

    shape = Shape(
        rows=sizes.rows,
        tokens=sizes.tokens,
        chunks=min(sizes.rows, MAX_CHUNKS),
        pages=-(-sizes.context // cache.page_size),
        page_size=cache.page_size,
        vocab=spec.vocab_size,
        count_rows=sizes.rows,
    )
    launcher = CudaGraphs if schedule.cuda_graphs else Plain
    machine = Machine(device, attention, launcher, kernels, triton_kernels, pdl)
    runner = GraphRunner(shape, machine, parts.processors, (spec.hidden, dtype), parts.upkeep)
    runner.use_model(loaded)
    runner.use_pool(pool, lambda share: progress("graphs", share))
    return runner


def _experts(spec: ModelSpec, dtype: torch.dtype, facts: CudaFacts) -> MoeConfigs | None:
    if (moe := spec.moe) is None:
        return None
    name = weight_name(spec.fp8 if expert_scales(spec, moe) else "", str(dtype).removeprefix("torch."))
    shape = MoeShape(moe.experts, moe.intermediate, spec.hidden, moe.per_token, name, facts.name)
    return MoeConfigs(shape, deep=facts.capability == HOPPER)
