"""How many rows and tokens a step holds, and how long a request may be."""

from __future__ import annotations

import logging

import msgspec
import torch

from core.config import LEAST_STEP, ModelConfig, ScheduleConfig
from core.errors import ConfigError
from core.models import ModelSpec, RopeSpec
from gpu.parts import Sizes

log = logging.getLogger(__name__)

CPU_ROWS = 64
"""Requests that run at once on a CPU: past this a step is compute-bound and rows only wait longer."""

CUDA_ROWS = 512
"""Requests that run at once on a GPU: a step of the models this is made for then takes some 25 ms. Each
further row adds little to the throughput and its whole cost to everybody's time between tokens."""

LINEAR_ROWS = 128
"""Requests that run at once where each has states of linear attention: 50 MiB of a Qwen3.5-9B, 75 of a
Qwen3-Next."""

CPU_STEP = 2048
CUDA_STEP = 8192
"""Tokens of a step: on an H200 8,192 in place of 2,048 brought 8% more of Qwen3-30B-A3B's prompts and answers
together (256 at a time) and 22% more of its prompts, tiles of the experts tuned in between; nothing on 8B."""

INT8_STEP = 512
"""Tokens of a step on a CPU with dense matrices of 8 bits, which multiplies at most 256 rows at once. It
reads prompts as fast as in steps of 2,048, which take 40 MiB more for 1,023 tokens of a 1.5B."""


def with_budget(schedule: ScheduleConfig, device: torch.device, int8: bool = False) -> ScheduleConfig:
    """`schedule` with the tokens of a step settled; `int8`: for a CPU with dense matrices of 8 bits."""
    usual = CPU_STEP if device.type == "cpu" else CUDA_STEP
    if int8:
        usual = max(INT8_STEP, min(schedule.max_running, usual))
    tokens = schedule.step_tokens or usual
    if tokens < LEAST_STEP:
        raise ConfigError(f"--step-tokens {tokens} is too few: at least {LEAST_STEP}, or 0 for a choice.")
    return msgspec.structs.replace(schedule, step_tokens=tokens)


def choose_sizes(
    spec: ModelSpec, model: ModelConfig, schedule: ScheduleConfig, device: torch.device
) -> Sizes:
    """The sizes of an executor whose tokens of a step are settled. Raises `ConfigError` for what does not
    fit."""
    return Sizes(_rows(spec, schedule, device), schedule.step_tokens, _context(spec, model, schedule))


def fit_rope(spec: ModelSpec, context: int) -> ModelSpec:
    """`spec` for requests of up to `context` tokens: LongRoPE has other factors for texts longer than those
    that the model was first trained on."""

    def fit(rope: RopeSpec) -> RopeSpec:
        return msgspec.structs.replace(rope, long=rope.kind == "longrope" and context > rope.original_max)

    window_rope = spec.window_rope and fit(spec.window_rope)
    return msgspec.structs.replace(spec, rope=fit(spec.rope), window_rope=window_rope)


def _rows(spec: ModelSpec, schedule: ScheduleConfig, device: torch.device) -> int:
    """Every running row gets a token in every step, so the budget bounds them."""
    if schedule.max_running > schedule.step_tokens:
        raise ConfigError(
            f"--max-running {schedule.max_running} rows do not fit steps of --step-tokens "
            f"{schedule.step_tokens}: lower the one or raise the other."
        )
    usual = CPU_ROWS if device.type == "cpu" else CUDA_ROWS if spec.linear is None else LINEAR_ROWS
    return schedule.max_running or min(usual, schedule.step_tokens)


def _context(spec: ModelSpec, model: ModelConfig, schedule: ScheduleConfig) -> int:
    if model.context_length > spec.context_length:
        raise ConfigError(
            f"--context-length {model.context_length} is longer than the {spec.context_length} tokens "
            f"that {spec.architecture} of this checkpoint was made for. Lower it, or leave it out."
        )
    context = model.context_length or spec.context_length
    if spec.causal or context <= schedule.step_tokens:
        return context
    log.warning(
        "inputs of more than %d tokens are refused: an encoder reads a text in one step. "
        "--step-tokens %d would take all that the model can.",
        schedule.step_tokens,
        context,
    )
    return schedule.step_tokens
