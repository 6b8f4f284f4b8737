"""A GPU's runner, put together. Imports Triton, so only `gpu.build` loads it, and only for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from core.config import CacheConfig, ModelConfig, ScheduleConfig
from core.models import ModelSpec
from gpu.attention.backend import AttentionBackend, attention_config
from gpu.attention.selector import device_attention
from gpu.device import HOPPER, CudaFacts
from gpu.draft.build import make_drafter, pool_of
from gpu.draft.model import DraftMachine
from gpu.kernels.delta import gated_delta
from gpu.kernels.gemm.cublaslt import products
from gpu.kernels.gemm.skinny import split_k_counters
from gpu.kernels.jit import compiled_ahead
from gpu.kernels.lora.linear import Branch
from gpu.kernels.moe.tuned import MoeConfigs, MoeShape, weight_name
from gpu.kernels.ngram import look_up
from gpu.kernels.sampling import drafts as draft_kernels
from gpu.kernels.sampling import kernels as triton_kernels
from gpu.kernels.step import begin_step
from gpu.kv.pool import KvPool
from gpu.layers.moe import experts_held
from gpu.memory import page_dtype
from gpu.ops.base import Ops
from gpu.ops.fused import Kernels, TritonOps
from gpu.ops.peers import PeerOps
from gpu.ops.ranks import RankOps, TableOps
from gpu.parts import Parts
from gpu.peers import PeerRank
from gpu.ranks import Rank
from gpu.runner import ModelRunner
from gpu.state.entry import CASCADE_ROWS
from gpu.state.view import StepView
from gpu.step.graphs import CudaGraphs, Plain
from gpu.step.machine import Machine
from gpu.step.rings import Entries
from gpu.step.shape import Shape
from gpu.step.steps import PaddedSizes
from gpu.thread import device_thread

MAX_CHUNKS = 64
"""Chunks of a step. Attention's grid has room for a partial block of each: at 512, programs that find no
work were reckoned to take 9 µs a layer."""


def captured_runners(
    ranks: Sequence[Parts], model: ModelConfig, cache: CacheConfig, schedule: ScheduleConfig
) -> list[ModelRunner]:
    """The runners of all ranks, which read the same ring entries. Raises `ConfigError` for an attention
    backend that is unavailable."""
    first = ranks[0]
    shape = first.shape(cache.page_size, min(first.sizes.rows, MAX_CHUNKS))
    entries = shape.entries(first.target.device)
    made = []
    for parts in ranks:
        with device_thread(parts.target.device):
            made.append(_captured_runner(parts, shape, entries, model, cache, schedule))
    return made


def _captured_runner(
    parts: Parts,
    shape: Shape,
    entries: Entries,
    model: ModelConfig,
    cache: CacheConfig,
    schedule: ScheduleConfig,
) -> ModelRunner:
    """A runner whose steps are CUDA graphs."""
    spec, (device, dtype, _), sizes, rank = parts.spec, parts.target, parts.sizes, parts.rank
    samples = entries.limits.samples  # each token of a decode row is sampled from, and a row to attention
    query = _Query(1 + shape.drafts, shape.trees)
    attention, plain, pdl = _layers(spec, parts, model, cache, samples, query)
    ops: MakeOps = plain
    if rank is not None:
        kind = PeerOps if isinstance(rank, PeerRank) else RankOps
        ops = partial(with_rank, plain, kind, rank, spec.vocab_size)
    launcher = CudaGraphs if schedule.cuda_graphs and not spec.uncaptured else Plain
    padded = PaddedSizes(samples, shape.tokens, shape.chunks, shape.drafts, shape.adapters)
    delta = partial(gated_delta, pdl=pdl)
    machine = Machine(
        device,
        padded,
        launcher,
        attention,
        ops,
        begin_step,
        triton_kernels,
        pdl,
        rank,
        parts.paced,
        delta,
        compiled_ahead,
    )
    drafter = None
    if (draft := parts.draft) is not None:
        run = None
        if (layers := draft.layers) is not None:
            own = _layers(layers, parts, model, cache, samples, query)
            pages = pool_of(layers, page_dtype(cache, dtype), device)
            beside: MakeOps = own.ops
            if rank is not None:
                beside = partial(with_rank, own.ops, TableOps, rank, spec.vocab_size)
            run = DraftMachine(own.attention, beside, pages, draft_kernels, pdl)
        drafter = make_drafter(draft, sizes.context, samples, dtype, device, run, partial(look_up, pdl=pdl))
    return ModelRunner(shape, machine, entries, parts.processors, parts.maintenance, drafter)


MakeOps = Callable[[KvPool], Callable[[StepView], Ops]]
"""Makes, for the pages of a pool, what makes the operations of each step's layers."""


class _Query(NamedTuple):
    """The query of a decode row: its most tokens, and whether its drafts may be trees."""

    longest: int
    trees: bool


class _Layers(NamedTuple):
    """How a model's layers run."""

    attention: AttentionBackend
    ops: Callable[[KvPool], Callable[[StepView], TritonOps]]
    pdl: bool


def _layers(
    spec: ModelSpec, parts: Parts, model: ModelConfig, cache: CacheConfig, samples: int, query: _Query
) -> _Layers:
    """Return the attention backend, the operations and whether launches are dependent, for the layers of
    `spec` in steps of up to `samples` sampled tokens and rows of up to `query` tokens."""
    device, dtype, facts = parts.target
    config = attention_config(spec, cache.page_size, samples, dtype, device, facts)
    config = config._replace(cascade_rows=CASCADE_ROWS, query=query.longest, trees=query.trees)
    config = config._replace(progress=parts.progress)
    if page_dtype(cache, dtype).itemsize == 1:
        # A checkpoint's own are not read yet. At 1 e4m3 has its three bits from 2^-6 to 448, and saturates.
        config = config._replace(kv_scales=(1.0, 1.0))
    attention, pdl = device_attention(config, model.attention_backend), config.pdl
    experts, dense = _experts(spec, dtype, facts), products(facts.name, device)

    def ops(pool: KvPool) -> Callable[[StepView], TritonOps]:
        counters = split_k_counters(device) if pdl else None  # pdl's devices have the room, too
        kernels = Kernels(
            attention, pool.caches(), experts, pdl, config.kv_scales, counters, dense, Branch(device)
        )
        return lambda view: TritonOps(view, kernels)

    return _Layers(attention, ops, pdl)


def with_rank(
    make: Callable[[KvPool], Callable[[StepView], TritonOps]], kind: Any, rank: Rank, vocab: int, pool: KvPool
) -> Callable[[StepView], Ops]:
    """Makes the operations of a step's layers as those of a `rank`, of `kind` PeerOps, RankOps or
    TableOps."""
    own = make(pool)
    return lambda view: kind(own(view), rank, vocab)


def with_kernels(machine: Machine) -> Machine:
    """`machine` with the first and the last kernels of a GPU, for steps that are not captured."""
    return machine._replace(begin=begin_step, sampling=triton_kernels)


def _experts(spec: ModelSpec, dtype: torch.dtype, facts: CudaFacts) -> MoeConfigs | None:
    if (moe := spec.moe) is None:
        return None
    name = weight_name(experts_held(spec, moe), str(dtype).removeprefix("torch."))
    shape = MoeShape(moe.experts, moe.intermediate, spec.hidden, moe.per_token, name, facts.name)
    return MoeConfigs(shape, deep=facts.capability == HOPPER)
