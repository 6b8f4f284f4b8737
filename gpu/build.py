"""From settings to an executor: the one face that the composition root calls."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import torch

from core.config import CacheConfig, ModelConfig, ScheduleConfig
from core.errors import ConfigError, ModelError
from core.executor import Capabilities
from core.models import ModelSpec, read_spec
from gpu.attention import TorchAttention
from gpu.executor import LocalExecutor
from gpu.kv.pool import KvPool
from gpu.memory import available_bytes, memory_table, plan_memory
from gpu.models.base import CausalModel
from gpu.runner import ModelRunner
from gpu.sample.processors import load_processors
from gpu.sample.sampler import Sampler
from gpu.state.slots import SlotState
from gpu.thread import device_thread
from gpu.upkeep import Upkeep
from gpu.weights import config_from_gguf, load_model

log = logging.getLogger(__name__)

CPU_ROWS = 64
"""Requests that run at once on a CPU: past this a step is compute-bound and rows only wait longer."""

Progress = Callable[[str, float], None]
"""Called with a stage and the share of it that is done, 0 to 1; from any thread."""


def spec_of(source: Path) -> ModelSpec:
    """Read the spec of a Hugging Face directory or a .gguf file. Raises `ModelError`."""
    if source.suffix == ".gguf":
        return read_spec(config_from_gguf(source))
    config = source / "config.json"
    if not config.is_file():
        raise ModelError(
            f"{source} has no config.json: --model takes a Hugging Face directory or a .gguf file."
        )
    generation = source / "generation_config.json"
    return read_spec(_load(config), _load(generation) if generation.is_file() else None)


def _load(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not readable JSON: {error}.") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} must hold a JSON object.")
    return found


def build_executor(
    spec: ModelSpec,
    source: Path,
    model: ModelConfig,
    cache: CacheConfig,
    schedule: ScheduleConfig,
    progress: Progress,
) -> LocalExecutor:
    """Estimate memory, load, allocate. The executor is not started.

    Raises `ConfigError` (too little memory, a context the model does not have, no such device or logit
    processor) or `ModelError` (the checkpoint), in both cases before or instead of an executor.
    """
    device = _device(model)
    dtype = torch.float32 if model.dtype == "auto" else getattr(torch, model.dtype)
    context = _context(spec, model)
    rows = _rows(schedule)
    processors = load_processors(model.logit_processor)
    progress("memory", 0.0)
    memory = plan_memory(spec, dtype, cache, available_bytes(), rows * context)
    for line in memory_table(memory):
        log.info("%s", line)
    context = min(context, memory.tokens)

    def load(path: str) -> CausalModel:
        if Path(path) != source and spec_of(Path(path)) != spec_of(source):
            raise ModelError(f"{path} is another model: its config.json differs from the running one's.")
        weights = None if model.load_format == "dummy" else Path(path)
        loaded = load_model(spec, weights, dtype, device, lambda share: progress("weights", share))
        loaded.seal()
        return loaded

    def make_pool() -> KvPool:
        heads = (spec.kv_heads, spec.head_dim)
        return KvPool(spec.layers, memory.num_pages, cache.page_size, heads, dtype, device)

    with device_thread(device):
        loaded = load(str(source))
        progress("pool", 0.0)
        pool = make_pool()
        slots = SlotState(rows, -(-context // cache.page_size), device)
        windows = [spec.window(layer) for layer in range(spec.layers)]
        attention = TorchAttention(pool, slots, windows)
        sampler = Sampler(rows, spec.vocab_size, rows, device, processors)
        upkeep = Upkeep(str(source), load, make_pool)
        runner = ModelRunner(loaded, slots, attention, sampler, cache.page_size, upkeep)
    progress("ready", 1.0)
    return LocalExecutor(
        runner,
        Capabilities(
            num_pages=memory.num_pages,
            page_size=cache.page_size,
            max_rows=rows,
            context_length=context,
            vocab_size=spec.vocab_size,
            max_step_tokens=schedule.step_tokens,
            count_rows=rows,
            device=str(device),
            processors=tuple(processors),
        ),
    )


def _device(model: ModelConfig) -> torch.device:
    if model.device == "cuda":
        raise ConfigError("--device cuda is not available in this version: use --device cpu.")
    return torch.device("cpu")


def _rows(schedule: ScheduleConfig) -> int:
    """Every running row gets a token in every step, so the budget bounds them."""
    if schedule.max_running > schedule.step_tokens:
        raise ConfigError(
            f"--max-running {schedule.max_running} rows do not fit steps of --step-tokens "
            f"{schedule.step_tokens}: lower the one or raise the other."
        )
    return schedule.max_running or min(CPU_ROWS, schedule.step_tokens)


def _context(spec: ModelSpec, model: ModelConfig) -> int:
    if model.context_length > spec.context_length:
        raise ConfigError(
            f"--context-length {model.context_length} is longer than the {spec.context_length} tokens "
            f"that {spec.architecture} of this checkpoint was made for."
        )
    return model.context_length or spec.context_length
