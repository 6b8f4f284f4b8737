"""From settings to an executor: the one face that the composition root calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from msgspec.structs import replace

from core.adapters import AdapterLimits
from core.config import CacheConfig, ModelConfig, ParallelConfig, ScheduleConfig, SpeculativeConfig
from core.env import read_json, read_object
from core.errors import ConfigError, ModelError
from core.executor import Capabilities
from core.models import ModelSpec, PoolingSpec, read_spec, sentence_pooling, unsupported
from core.models.fields import Config
from core.plan import MASKED_DRAFTS
from gpu.adapting import Adapting, plan_adapters
from gpu.attention import EncoderAttention, TorchBackend, torch_attention
from gpu.attention.cpu_paged import CpuAttention, cpu_attention
from gpu.device import LEAST_FP8, loading
from gpu.draft import kernels as draft_kernels
from gpu.draft.build import Draft, check_target, make_drafter, pool_of, read_drafting
from gpu.draft.build import Make as MakeDrafter
from gpu.draft.model import DraftMachine
from gpu.executor import LocalExecutor
from gpu.kv.pool import KvPool
from gpu.kv.states import StatePool
from gpu.maintenance import Maintenance
from gpu.memory import (
    MemoryPlan,
    device_needs,
    free_bytes,
    memory_phrases,
    memory_table,
    page_dtype,
    plan_memory,
    with_states,
)
from gpu.models.base import CausalModel
from gpu.models.ranks import RankModel
from gpu.nodes.join import Nodes
from gpu.nodes.remote import RemoteNode
from gpu.ops.base import Ops
from gpu.ops.cpu import CpuOps, choose_cpu_kernels, fits
from gpu.ops.plain import TorchOps
from gpu.ops.ranks import RankOps, TableOps
from gpu.parts import Parts, Sizes, Target
from gpu.ranks import Rank
from gpu.runner import ModelRunner
from gpu.sample import torch_kernels
from gpu.sample.processors import load_processors, shared
from gpu.shard import ALONE, Shard
from gpu.sizes import choose_sizes, fit_rope, with_budget
from gpu.state.view import StepView
from gpu.step.begin import begin_step
from gpu.step.machine import Machine
from gpu.step.rings import Entries
from gpu.step.shape import Shape
from gpu.step.shapes import mixed_sizes, most_samples
from gpu.step.steps import ExactSizes, PaddedSizes
from gpu.targets import MostExchanged, choose_ranks, choose_targets
from gpu.thread import device_thread
from gpu.weight_formats import (
    choose_fp8,
    choose_int4,
    choose_int8,
    choose_mxfp4,
    choose_q4,
    choose_w8a8,
    shard_spec,
)
from gpu.weights import config_from_gguf, load_model

log = logging.getLogger(__name__)


class Drafting(NamedTuple):
    """Settings of speculative decoding, whose algorithm is known, and where the draft model lies."""

    settings: SpeculativeConfig
    path: Path | None = None


NO_DRAFTS = Drafting(SpeculativeConfig(algorithm="none"))


class Beside(NamedTuple):
    """What runs beside the model.

    drafting  speculative decoding
    adapters  limits of LoRA adapters; None: none can be loaded
    parallel  ranks and replicas
    replica   number of this replica
    nodes     the processes that have this replica's other ranks; None: all ranks are in this process
    """

    drafting: Drafting = NO_DRAFTS
    adapters: AdapterLimits | None = None
    parallel: ParallelConfig = ParallelConfig()
    replica: int = 0
    nodes: Nodes | None = None


NOTHING_BESIDE = Beside()

Progress = Callable[[str, float], None]
"""Called with a stage and the share of it that is done, 0 to 1; from any thread."""


def spec_of(source: Path) -> ModelSpec:
    """Read the spec of a Hugging Face directory or a .gguf file. Raises `ModelError`."""
    if source.suffix == ".gguf":
        return model_spec(config_from_gguf(source))
    config = read_object(source / "config.json")
    if config is None:
        raise ModelError(
            f"{source} has no config.json: --model takes a Hugging Face directory or a .gguf file."
        )
    return model_spec(config, pooling_of(source))


def model_spec(config: Config, pooling: PoolingSpec | None = None) -> ModelSpec:
    """The spec of a config.json; see `core.models.read_spec`. For a model that runs through transformers it
    is read from its class there, made without memory. Raises `ModelError`."""
    spec = read_spec(config, pooling)
    if not spec.transformers:
        return spec
    try:
        from gpu.models.transformers_check import settled  # 2 s, and not for families
    except ImportError as error:
        raise unsupported(
            spec.architecture, f"to run it through transformers needs transformers 5 ({error})"
        ) from error
    return settled(spec)


def check_config(config: Config, embeds: bool, settings: SpeculativeConfig = NO_DRAFTS.settings) -> None:
    """Raise `ModelError` for a config.json that cannot be served, and `ConfigError` where nothing drafts for
    it as `settings` ask for, before its weights are fetched. `embeds`: it lies in a sentence-transformers
    directory."""
    # Which pooling a directory asks for is written in files that are fetched with the weights.
    spec = model_spec(config, PoolingSpec() if embeds else None)
    if (algorithm := settings.algorithm) in ("auto", "none"):
        return
    if embeds:
        raise ConfigError(
            f"--speculative-algorithm {algorithm}: a model of sentence-transformers generates no text."
        )
    check_target(settings, spec)


def pooling_of(source: Path) -> PoolingSpec | None:
    """What a sentence-transformers directory says of pooling; None for any other source. Raises
    `ModelError`."""
    return sentence_pooling(lambda place: read_json(source / place))


def build_executor(
    spec: ModelSpec,
    source: Path,
    model: ModelConfig,
    cache: CacheConfig,
    schedule: ScheduleConfig,
    progress: Progress,
    beside: Beside = NOTHING_BESIDE,
) -> LocalExecutor:
    """Estimate memory, load, allocate. The executor is not prepared: ranks capture on threads of their own.

    Raises `ConfigError` (too little memory, a context the model does not have, no such device, attention
    backend or logit processor), `ModelError` (the checkpoint) or `EngineFailed` (another node is gone),
    before or instead of an executor.
    """
    limits, parallel, nodes = beside.adapters, beside.parallel, beside.nodes
    targets, whole, spec, schedule, sizes, draft = _settle(spec, model, cache, schedule, beside)
    target = targets[0]
    device, dtype = target.device, target.dtype
    processors = load_processors(model.logit_processor)
    dummy = model.load_format == "dummy"
    group, ranks = choose_ranks(targets, whole, MostExchanged(sizes.rows, sizes.tokens), draft, nodes)
    shards = [ALONE if rank is None else rank.shard for rank in ranks]
    adapting = [plan_adapters(spec, limits, dtype, shard) for shard in shards]
    progress("memory", 0.0)
    sharing = Sharing(draft, adapting[0], parallel.dp * len(targets), nodes is not None)
    free = _free_bytes(targets, nodes)
    memory = _memory(spec, target, sizes, cache, sharing, free)

    loader = _Loader(spec, source, targets, dummy, progress)
    models = loader.load_all(ranks)
    if device.type == "cuda":
        # Weights are what they are now; before, they were reckoned.
        left = _free_bytes(targets, nodes)
        memory = _memory(spec, target, sizes, cache, sharing, left, loaded=free - left)
    for line in memory_table(memory):
        log.info("%s", line)
    sizes = sizes._replace(context=min(sizes.context, memory.tokens))

    def make_pool(device: torch.device) -> KvPool:
        kept = page_dtype(cache, dtype)
        pool = KvPool(spec.kv_layers, memory.num_pages, cache.page_size, spec.kv_shape, kept, device)
        if spec.linear is not None:
            drafts = 0 if draft is None else draft.most
            pool.states = StatePool(spec.linear, sizes.rows + 1, memory.checkpoints, dtype, device, drafts)
        return pool

    progress("pool", 0.0)
    own_kernels = None
    if device.type == "cpu":
        own_kernels = choose_cpu_kernels(spec, dtype, model.attention_backend)
    each: list[Parts] = []
    for own, rank, loaded, room in zip(targets, ranks, models, adapting, strict=True):
        with device_thread(own.device):
            tiers = None if room is None else room.allocate(loaded, own.device)
        load, pool = partial(loader.load, rank), partial(make_pool, own.device)
        first = rank is None or not rank.shard.rank
        maintenance = Maintenance(str(source), load, pool, device.type == "cpu", tiers, first)
        paced = schedule.itl_target > 0
        parts = Parts(spec, own, sizes, processors, maintenance, draft, limits, rank, paced, progress)
        each.append(parts._replace(kernels=own_kernels))
    if target.captures(spec):
        from gpu.cuda import captured_runners  # Triton, which a CPU may not have

        runners = captured_runners(each, model, cache, schedule)
    else:
        runners = _called_runners(each, cache.page_size)
    for own, runner, loaded in zip(targets, runners, models, strict=True):
        with device_thread(own.device):
            runner.use_model(loaded)
            runner.use_pool(make_pool(own.device))
    others = [partial(RemoteNode, channel) for channel in nodes.channels] if nodes and nodes.leads else []
    return LocalExecutor(runners, _capabilities(each[0], memory, runners[0]), group, others)


def foresee(
    spec: ModelSpec, model: ModelConfig, cache: CacheConfig, schedule: ScheduleConfig, beside: Beside
) -> Sequence[str]:
    """The table that a start would log, from the memory that is free now; nothing is loaded or allocated, and
    other nodes are not asked. Raises `ConfigError` and `ModelError` as `build_executor` does."""
    settled, parallel = _settle(spec, model, cache, schedule, beside), beside.parallel
    target = settled.targets[0]
    adapting = plan_adapters(settled.spec, beside.adapters, target.dtype, Shard(0, parallel.tp))
    ranks = parallel.dp * len(settled.targets)
    sharing = Sharing(settled.draft, adapting, ranks, parallel.nnodes > 1)
    free = _free_bytes(settled.targets, None)
    return memory_table(_memory(settled.spec, target, settled.sizes, cache, sharing, free))


class _Settled(NamedTuple):
    """What follows from settings and checkpoint. `spec` is that of one rank of the `whole` model."""

    targets: Sequence[Target]
    whole: ModelSpec
    spec: ModelSpec
    schedule: ScheduleConfig
    sizes: Sizes
    draft: Draft | None


def _settle(
    spec: ModelSpec, model: ModelConfig, cache: CacheConfig, schedule: ScheduleConfig, beside: Beside
) -> _Settled:
    """Raises `ConfigError` and `ModelError`."""
    drafting, parallel = beside.drafting, beside.parallel
    targets = choose_targets(spec, model, parallel, beside.replica)
    target = targets[0]
    int4 = choose_int4(spec, model, target)
    fp8, mxfp4 = "" if int4 else choose_fp8(spec, model, target), choose_mxfp4(spec, model, target)
    eight, w8a8 = choose_int8(spec, model, target), choose_w8a8(spec, model, target)
    schedule = with_budget(schedule, target.device, eight and spec.moe is None)
    share = choose_q4(spec, model, target)
    whole = replace(spec, int4=int4, fp8=fp8, w8a8=w8a8, mxfp4=mxfp4, int8=eight, q4_share=share)
    check_pages(whole, target, cache)
    own = shard_spec(whole, parallel.tp)
    sizes = choose_sizes(own, model, schedule, target.device)
    own = fit_rope(own, sizes.context)
    dummy = model.load_format == "dummy"
    draft = read_drafting(drafting.settings, drafting.path, whole, dummy, spec_of)
    return _Settled(targets, whole, own, schedule, sizes, draft)


class _Loader(NamedTuple):
    """Reads the checkpoint at `source`, whose `spec` is that of one rank; `dummy`: random weights."""

    spec: ModelSpec
    source: Path
    targets: Sequence[Target]
    dummy: bool
    progress: Progress

    def load(self, rank: Rank | None, path: str) -> CausalModel:
        """The model of `path`, or the part of it that `rank` has."""
        spec, source, targets, dummy, progress = self
        if Path(path) != source:  # formats of a .gguf file's matrices may differ
            own, other = (replace(spec_of(each), q4_share=0.0) for each in (source, Path(path)))
            if other != own:
                raise ModelError(f"{path} is another model: its config.json differs from the running one's.")
        weights, shard = None if dummy else Path(path), ALONE if rank is None else rank.shard
        local = shard.rank % len(targets)
        device, dtype, _ = targets[local]

        def report(share: float) -> None:
            if not local:
                progress("weights", share)

        with device_thread(device), loading(device):
            loaded = load_model(spec, weights, dtype, device, report, shard)
            loaded.seal()
        return loaded if rank is None else RankModel(loaded, rank)

    def load_all(self, ranks: Sequence[Rank | None]) -> list[CausalModel]:
        """The models of all ranks, each loaded by a thread of its own where there are several."""
        if len(ranks) == 1:
            return [self.load(ranks[0], str(self.source))]
        with ThreadPoolExecutor(len(ranks), "loom-load-rank") as pool:
            return list(pool.map(partial(self.load, path=str(self.source)), ranks))


def _capabilities(parts: Parts, memory: MemoryPlan, runner: ModelRunner) -> Capabilities:
    (device, dtype, facts), shape = parts.target, runner.shape
    return Capabilities(
        num_pages=memory.num_pages,
        page_size=shape.page_size,
        max_rows=shape.rows,
        context_length=parts.sizes.context,
        vocab_size=shape.vocab,
        max_step_tokens=shape.tokens,
        max_chunks=shape.chunks,
        step_sizes=tuple(mixed_sizes(shape.tokens)) if device.type == "cuda" else (),
        max_drafts=shape.drafts,
        masked_drafts=0 if shape.trees else MASKED_DRAFTS,
        max_samples=shape.samples,
        causal=parts.spec.causal,
        checkpoints=None if parts.spec.linear is None else memory.checkpoints,
        dtype=str(dtype).removeprefix("torch."),
        weight_dtype=memory.weight_dtype,
        kv_dtype=memory.kv_dtype,
        attention_backend=runner.attention_backend,
        memory=memory_phrases(memory),
        device=facts.name if device.type == "cuda" else str(device),
        processors=tuple(parts.processors),
        adapters=shape.adapters,
    )


def _called_runners(ranks: Sequence[Parts], page_size: int) -> list[ModelRunner]:
    """The runners of all ranks, which read the same ring entries."""
    shape = ranks[0].shape(page_size, ranks[0].sizes.rows)
    entries = shape.entries(ranks[0].target.device)
    with device_thread(ranks[0].target.device):
        return [_called_runner(parts, shape, entries) for parts in ranks]


def _called_runner(parts: Parts, shape: Shape, entries: Entries) -> ModelRunner:
    """Steps in plain torch, called in the plan's own sizes."""
    spec, device, rank = parts.spec, parts.target.device, parts.rank
    attention: TorchBackend = EncoderAttention()
    if spec.causal:
        attention = called_attention(spec, parts)
    machine = Machine(
        device,
        ExactSizes(),
        None,
        attention,
        lambda pool: called_ops(attention, rank, RankOps, spec.vocab_size),
        begin_step,
        torch_kernels,
        rank=rank,
        paced=parts.paced,
    )
    if device.type == "cuda":
        from gpu.cuda import with_kernels  # Triton, which a CPU may not have

        machine = with_kernels(machine)
    drafter = None
    if (draft := parts.draft) is not None:
        drafter = _called_drafter(draft, parts, shape.samples)
    processors = parts.processors
    if rank is not None:
        processors = {name: shared(process, rank) for name, process in processors.items()}
    return ModelRunner(shape, machine, entries, processors, parts.maintenance, drafter)


def _called_drafter(draft: Draft, parts: Parts, samples: int) -> MakeDrafter:
    """A function that makes the drafter of a runner whose steps are not captured."""
    device, dtype, _ = parts.target
    run = None
    if (layers := draft.layers) is not None:
        attention = called_attention(layers, parts)
        run = DraftMachine(
            attention,
            lambda pool: called_ops(attention, parts.rank, TableOps, parts.spec.vocab_size),
            pool_of(layers, dtype, device),
            draft_kernels,
        )
    return make_drafter(draft, parts.sizes.context, samples, dtype, device, run)


def called_attention(spec: ModelSpec, parts: Parts) -> TorchBackend:
    """The attention of a causal model whose steps are not captured."""
    if parts.kernels is None or not fits(spec, parts.target.dtype):
        return torch_attention(spec)
    return cpu_attention(spec, parts.kernels)


def called_ops(
    attention: TorchBackend, rank: Rank | None, kind: type[TableOps], vocab: int
) -> Callable[[StepView], Ops]:
    """Makes the operations of a step's layers, of a `rank` as `kind`."""

    def make(view: StepView) -> Ops:
        return CpuOps(view, attention) if isinstance(attention, CpuAttention) else TorchOps(view, attention)

    return make if rank is None else lambda view: kind(make(view), rank, vocab)


def check_pages(spec: ModelSpec, target: Target, cache: CacheConfig) -> None:
    """Raises `ConfigError` for FP8 pages where nothing could read them."""
    if cache.kv_dtype != "fp8":
        return
    flag = f"--kv-dtype {cache.kv_dtype}"
    if spec.linear is not None:
        raise ConfigError(f"{flag}: {spec.architecture} has linear attention, and was never run with it.")
    if target.device.type != "cuda":
        raise ConfigError(f"{flag} needs a GPU (--device cuda): a CPU attends in its own dtype alone.")
    if not spec.causal:
        raise ConfigError(f"{flag}: {spec.architecture} keeps no keys and values.")
    if spec.latent is not None:
        raise ConfigError(
            f"{flag}: {spec.architecture} keeps latents (MLA), which are held in the model's dtype alone."
        )
    if target.facts.capability < LEAST_FP8:
        have, least = ("{}.{}".format(*pair) for pair in (target.facts.capability, LEAST_FP8))
        raise ConfigError(f"{flag} needs compute capability {least}, {target.facts.name} has {have}.")


class Sharing(NamedTuple):
    """What else takes memory beside a rank's part of the model: drafts, adapters, the other ranks of this
    process, and what goes to other nodes, if there are any."""

    draft: Draft | None
    adapting: Adapting | None
    ranks: int
    nodes: bool


def exchanged_bytes(spec: ModelSpec, dtype: torch.dtype, tokens: int, samples: int) -> int:
    """The most that an exchange by NCCL takes: the parts of all ranks and their sum, in float32 and in
    `dtype`; or those of logits, and these beside each other."""
    sums = tokens * spec.hidden * ((spec.ranks + 1) * dtype.itemsize + 4)
    return max(sums, 2 * samples * spec.vocab_size * 4)


def _memory(
    spec: ModelSpec,
    target: Target,
    sizes: Sizes,
    cache: CacheConfig,
    beside: Sharing,
    available: int,
    loaded: int = 0,
) -> MemoryPlan:
    needs, (draft, adapting, ranks, nodes) = None, beside
    limits, adapters = (None, 0) if adapting is None else (adapting.limits, adapting.device_bytes)
    rows, tokens, _ = sizes
    drafts = 0 if draft is None else draft.most
    if target.device.type == "cuda":
        samples = most_samples(rows, tokens, drafts)
        padded = PaddedSizes(samples, tokens, rows, drafts, limits)
        graphs = len(list(padded.all())) if target.captures(spec) else 0
        needs = device_needs(spec, target.dtype, rows, tokens, graphs, samples)
        exchanged = exchanged_bytes(spec, target.dtype, tokens, samples) if nodes else 0
        needs = needs._replace(adapters=adapters, workspace=needs.workspace + exchanged)
        if draft is not None:
            page = draft.page_bytes(cache, page_dtype(cache, target.dtype))
            needs = needs._replace(drafts=draft.held_bytes(spec, sizes, samples, target.dtype), page=page)
    else:
        available = available // ranks - adapters  # all of this process share a CPU's memory
    slots, each = with_states(spec, target.dtype, rows, available, drafts)
    room = available - slots * each
    plan = plan_memory(spec, target.dtype, cache, room, rows * sizes.context, needs, loaded)
    return plan._replace(available=plan.available + slots * each, slots=slots, slot_bytes=each)


def _free_bytes(targets: Sequence[Target], nodes: Nodes | None) -> int:
    """Free memory of the device that has the least: all ranks have equally many pages."""
    least = min(free_bytes(target.device) for target in targets)
    return least if nodes is None else nodes.least(least)
