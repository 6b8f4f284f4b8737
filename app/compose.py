"""The composition root: the one file that sees app, core and gpu. Settings to a running engine.

It knows neither sockets nor signals: the server (`app/server.py`) and `app.offline` build on it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from torch import __version__ as torch_version

from app.checkpoint.checkpoint import ADAPTER, Checkpoint, resolve, resolve_adapter, resolve_draft
from app.engine.adapters import Adapters
from app.engine.loop import Engine
from app.engine.operator import Operator
from app.engine.replicas import Replicas
from app.engine.submit import Submitter
from app.helper.process import HelperProcess
from app.parsers.registry import reasoning_family, tool_family
from app.process import VERSION, invocation
from app.service import SERVED, Loaded, ModelCard
from app.text.template import ChatTemplate
from app.text.tokenizer import Tokenizer
from core.adapters import AdapterInfo, AdapterLimits, adapter_limits, adapters_at_start
from core.cache.events import CacheEvents
from core.cache.manager import CacheManager
from core.clock import monotonic
from core.config import Config, ModelConfig
from core.env import cache_dir, read_object
from core.errors import ConfigError
from core.executor import Capabilities, Executor
from core.kv_events import kv_events
from core.models import ModelSpec, algorithm_of
from core.schedule.scheduler import Scheduler
from core.speculation import resolve_algorithm
from gpu.build import Beside, Drafting, build_executor, check_config, foresee, model_spec, pooling_of
from gpu.executor import LocalExecutor
from gpu.grammar import Compiler, Refused
from gpu.nodes.follow import Follower
from gpu.nodes.join import Nodes, join
from gpu.survey import survey
from gpu.targets import device_of_node
from gpu.weights import config_from_gguf

if TYPE_CHECKING:
    from app.engine.kv_events import Publisher

log = logging.getLogger(__name__)

MASK_THREADS = 8
"""Threads that fill masks at once: 64 rows of Qwen3's vocabulary take 0.9 ms on one."""

SHARED = ("model", "cache", "schedule", "speculative", "lora", "parallel")
"""Groups of settings that are equal on all nodes, but for `OWN`."""
OWN = ("node_rank", "dist_init_addr", "base_gpu_id", "gpu_id_step", "threads")

Progress = Callable[[str, float], None]
"""Called with a stage and the share of it that is done, 0 to 1; from any thread."""


class Live(msgspec.Struct, frozen=True):
    """Engines and all that serves them. Owner: event loop, once they are started."""

    replicas: Replicas
    loaded: Loaded
    adapters: list[AdapterInfo]
    """Adapters to load at the start."""
    grammars: Compiler | None
    memory: tuple[str, ...]
    """Contents of each device's memory, one phrase a part."""
    publishers: Sequence[tuple[Publisher, CacheEvents]]
    """A publisher for the events of each replica's cache; none unless `--kv-events-config` says so."""

    async def start(self) -> None:
        """Start the engines on the running loop. Raises `ConfigError` for an adapter that is refused."""
        loop = asyncio.get_running_loop()
        for publisher, events in self.publishers:
            publisher.start(loop, events, self.loaded.adapters.name)
        self.replicas.start(loop)
        await self.loaded.adapters.start(self.adapters)

    def close(self) -> None:
        """Stop every thread. Requests that still run end with an error."""
        self.replicas.close()
        for publisher, _ in self.publishers:
            publisher.close()
        if self.grammars is not None:
            self.grammars.close()
        self.loaded.helper.close()
        self.loaded.bodies.close()
        self.loaded.tokenizer.close()
        self.loaded.template.close()


def load(config: Config, progress: Progress) -> Live:
    """Fetch, read and place the model, and make an engine over it, which `live.start()` starts.
    Raises `ConfigError`; may run for minutes in any thread."""
    if node := config.parallel.node_rank:
        raise ConfigError(f"--node-rank {node} only runs ranks for node 0: start it with '{invocation()}'.")
    with ExitStack() as refused:
        publishers: list[Publisher] = []
        for each in _publishers(config):
            refused.callback(each.close)
            publishers.append(each)
        live = _load(config, publishers, progress)
        refused.pop_all()
    return live


def _load(config: Config, publishers: Sequence[Publisher], progress: Progress) -> Live:
    checkpoint, spec = _checkpoint(config, progress)
    progress("tokenizer", 0.0)
    tokenizer = Tokenizer.load(checkpoint.tokenizer, spec.vocab_size, checkpoint.eos_ids, checkpoint.bos_id)
    template = ChatTemplate.load(checkpoint.tokenizer, checkpoint.chat_template, tokenizer.special_tokens)
    adapters = _adapters_at_start(config, progress)
    limits = _limits(config, adapters)
    helper = HelperProcess()
    generates = spec.task == "generate"
    grammars = _grammars(tokenizer, spec.vocab_size, helper) if generates else None
    beside = Beside(_drafting(config, checkpoint.path, progress), limits, config.parallel)
    executors = _executors(config, spec, checkpoint.path, beside, progress)
    executor = executors[0]
    if grammars is not None and executor.capabilities.device != "cpu":
        grammars.prepare()
    progress("engine", 0.0)
    if limits is not None and executor.capabilities.adapters is None:
        raise ConfigError("LoRA adapters are not available for this model on this device.")
    events = [CacheEvents(each.capabilities.num_pages) if publishers else None for each in executors]
    engines = [_engine(each, config, told) for each, told in zip(executors, events, strict=True)]
    replicas = Replicas(engines, config.parallel.load_balance_method)
    card = _card(checkpoint, spec, executor.capabilities, config.model)
    roots = [Path(path) for path in (*config.lora.lora_root, *(a.path for a in adapters))]
    registry = Adapters(replicas, executor.capabilities.adapters, (*card.names, SERVED), roots)
    submitter = Submitter(replicas, tokenizer, monotonic, grammars, generates, registry)
    loaded = Loaded(
        card,
        tokenizer,
        template,
        submitter,
        registry,
        Operator(replicas, cache_dir() / "traces", str(checkpoint.path)),
        tool_family(config.serve.tool_parser, template.source),
        reasoning_family(config.serve.reasoning_parser, template.source),
        settings=config.serve,
        helper=helper,
    )
    return Live(
        replicas,
        loaded,
        adapters,
        grammars,
        executor.capabilities.memory,
        [(each, told) for each, told in zip(publishers, events, strict=False) if told is not None],
    )


def _publishers(config: Config) -> Iterator[Publisher]:
    """Publishers of the cache's events, one for each replica. Made before the model is loaded: an address
    that is taken shows at once."""
    settings = kv_events(config.cache, config.parallel.dp)
    if settings is None:
        return
    try:
        from app.engine.kv_events import Publisher
    except ImportError as error:
        raise ConfigError(
            f"--kv-events-config needs pyzmq: pip install 'loom-serve[kv-events]' ({error})."
        ) from error
    for replica in range(config.parallel.dp):
        yield Publisher(settings, replica)


def load_executors(config: Config, progress: Progress) -> list[LocalExecutor]:
    """The prepared executors of `load` alone, one for each replica. Benches run steps on them without HTTP
    and text. Raises `ConfigError`."""
    return _executors(config, *_model_and_beside(config, progress), progress)


def foresee_memory(config: Config) -> Sequence[str]:
    """A table of what a device's memory would hold after `load`; nothing is loaded. Raises `ConfigError`."""
    spec, _, beside = _model_and_beside(config, lambda stage, share: None)
    return foresee(spec, config.model, config.cache, config.schedule, beside)


def describe_devices(config: Config) -> Sequence[str]:
    """A line for each device that `load` would use. Raises `ConfigError` where there is none as asked for."""
    return survey(config.model, config.parallel)


def follow(config: Config, progress: Progress) -> Follower:
    """The ranks of a node other than 0, loaded as node 0 loads its own. Raises `ConfigError` and
    `EngineFailed`; may run for minutes in any thread."""
    spec, source, beside = _model_and_beside(config, progress)
    nodes = _join(config, spec)
    with nodes.loading():
        executor = _executor(config, spec, source, beside._replace(nodes=nodes), progress)
    return Follower(executor, nodes.channels[0])


def find(config: Config, say: Callable[[str], None]) -> Checkpoint:
    """The checkpoint that a start would serve, fetched. Raises `ConfigError`, before its weights are fetched
    if nothing here runs it, or drafts for it as asked for."""
    return resolve(config.model, say, partial(check_config, settings=config.speculative))


def _model_and_beside(config: Config, progress: Progress) -> tuple[ModelSpec, Path, Beside]:
    checkpoint, spec = _checkpoint(config, progress)
    limits = _limits(config, _adapters_at_start(config, progress))
    drafting = _drafting(config, checkpoint.path, progress)
    return spec, checkpoint.path, Beside(drafting, limits, config.parallel)


def _checkpoint(config: Config, progress: Progress) -> tuple[Checkpoint, ModelSpec]:
    checkpoint = find(config, lambda text: progress(text, 0.0))
    return checkpoint, model_spec(checkpoint.config, pooling_of(checkpoint.path))


def _limits(config: Config, adapters: list[AdapterInfo]) -> AdapterLimits | None:
    return adapter_limits(config.lora, [read_object(Path(a.path) / ADAPTER) or {} for a in adapters])


def _join(config: Config, spec: ModelSpec) -> Nodes:
    """Meet the other nodes. What must be equal on all has the name that errors say."""
    device = device_of_node(config.model, config.parallel)
    facts = {"the version": VERSION, "torch": str(torch_version), "the device": device}
    for name in SHARED:
        group = msgspec.to_builtins(getattr(config, name))
        facts |= {f"--{key.replace('_', '-')}": str(value) for key, value in group.items() if key not in OWN}
    facts |= {f"{key} of config.json": str(value) for key, value in msgspec.to_builtins(spec).items()}
    return join(config.parallel, facts)


def _adapters_at_start(config: Config, progress: Progress) -> list[AdapterInfo]:
    """The adapters of `--lora`, fetched."""

    def fetched(adapter: AdapterInfo) -> AdapterInfo:
        path = resolve_adapter(adapter.path, config.model, lambda text: progress(text, 0.0))
        return msgspec.structs.replace(adapter, path=str(path))

    return [fetched(adapter) for adapter in adapters_at_start(config.lora)]


def _drafting(config: Config, model: Path, progress: Progress) -> Drafting:
    """The settings of speculative decoding, with the algorithm that the draft model is for. A layer for
    multi-token prediction lies in the checkpoint at `model` itself."""
    path = resolve_draft(config.speculative.draft_model_path, config.model, lambda text: progress(text, 0.0))
    facts = None
    if path is not None:
        facts = config_from_gguf(path) if path.is_file() else read_object(path / "config.json")
    settings = resolve_algorithm(config.speculative, facts, algorithm_of)
    return Drafting(settings, model if settings.algorithm == "mtp" else path)


def _grammars(tokenizer: Tokenizer, width: int, helper: HelperProcess) -> Compiler | None:
    """Return the compiler; its vocabulary is not read yet. On a CPU the first constraint reads it, because
    150,000 tokens take 190 MiB, a tenth of a small model's memory. Other streams wait a second then, as long
    as a few steps take there."""
    try:
        threads = min((os.cpu_count() or 2) // 2, MASK_THREADS) or 1
        return Compiler(tokenizer.token_table(width), helper, threads)
    except Refused as error:
        log.warning("constraints are not available: %s", error)
        return None


def _executors(
    config: Config, spec: ModelSpec, source: Path, beside: Beside, progress: Progress
) -> list[LocalExecutor]:
    """An executor for each replica, ready to run."""
    made: list[LocalExecutor] = []
    with ExitStack() as refused:
        if config.parallel.nnodes > 1:
            progress("waiting for the other nodes", 0.0)
            nodes = _join(config, spec)
            refused.enter_context(nodes.loading())
            beside = beside._replace(nodes=nodes)
        for replica in range(config.parallel.dp):
            if config.parallel.dp > 1:
                log.info("replica %d", replica)
            own = beside._replace(replica=replica)
            executor = _executor(config, spec, source, own, progress)
            refused.callback(executor.close)
            executor.prepare(partial(progress, "graphs"))
            made.append(executor)
        refused.pop_all()
    return made


def _executor(
    config: Config, spec: ModelSpec, source: Path, beside: Beside, progress: Progress
) -> LocalExecutor:
    return build_executor(spec, source, config.model, config.cache, config.schedule, progress, beside)


def _engine(executor: Executor, config: Config, events: CacheEvents | None) -> Engine:
    capabilities = executor.capabilities
    cache = CacheManager(
        capabilities.num_pages,
        capabilities.page_size,
        # An encoder's results for a prefix depend on what follows it.
        radix=config.cache.radix_cache and capabilities.causal,
        eviction=config.cache.eviction,
        pin_share=config.cache.pin_share,
        events=events,
    ).with_checkpoints(capabilities.checkpoints)
    scheduler = Scheduler(capabilities, cache, config.schedule, monotonic)
    return Engine(scheduler, executor, config.schedule.overlap_depth, monotonic)


def _card(
    checkpoint: Checkpoint, spec: ModelSpec, capabilities: Capabilities, config: ModelConfig
) -> ModelCard:
    return ModelCard(
        name=checkpoint.names[0],
        aliases=checkpoint.names[1:],
        path=str(checkpoint.tokenizer or checkpoint.path),
        architecture=checkpoint.config["architectures"][0],
        context_length=capabilities.context_length,
        vocab_size=spec.vocab_size,
        dtype=capabilities.dtype or config.dtype,
        weight_dtype=capabilities.weight_dtype,
        kv_dtype=capabilities.kv_dtype,
        attention_backend=capabilities.attention_backend,
        created=int(time.time()),
        device=capabilities.device,
        format="gguf" if checkpoint.path.suffix == ".gguf" else "safetensors",
        size=checkpoint.size,
        sampling=msgspec.structs.replace(checkpoint.sampling, logprobs_mode=config.logprobs_mode),
        implementation=spec.implementation,
        hidden_size=spec.hidden,
        routed=(0, 0) if spec.moe is None else (spec.layers, spec.moe.per_token),
        task=spec.task,
        pooling=spec.pooling,
    )
