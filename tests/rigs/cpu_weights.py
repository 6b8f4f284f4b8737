"""Quantised checkpoints on a CPU: their specs, and answers of a whole engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch

from core.adapters import LINEAR, AdapterLimits
from core.config import CacheConfig, ModelConfig, ParallelConfig, ScheduleConfig
from core.models import ModelSpec
from core.request import SamplingParams
from gpu.build import Beside, build_executor, spec_of
from gpu.device import CudaFacts
from gpu.parts import Target
from gpu.weight_formats import choose_int8
from tests.rigs.driver import Answer, Driver
from tests.rigs.int4_files import WIDE
from tests.rigs.runner import CPU

SIZES = {**WIDE, "initializer_range": 0.1}
"""Sizes of a model with wide matrices, less steep than other tiny models: it does not multiply rounding
errors."""
ALL: dict[str, Any] = {"num_experts_per_tok": 4}
"""Changes to models with experts: a router that takes some takes others near a tie, and tells nothing of
rounding."""

ON_CPU = Target(CPU, torch.float32, CudaFacts("no GPU"))

PROMPTS = [[int(i * 37 % 241) + 3 for i in range(n)] for n in (90, 23, 40)]
PARAMS = [SamplingParams(temperature=0.0, max_tokens=n, logprobs=2, prompt_logprobs=0) for n in (6, 12, 4)]
LIMITS = AdapterLimits(places=1, max_rank=8, host=2, targets=LINEAR)

EXACT = ModelConfig(device="cpu", quantization="none", dtype="float32")
AUTO = ModelConfig(device="cpu")


def answers(
    path: Path,
    model: ModelConfig,
    tp: int = 1,
    adapter: Path | None = None,
    then: Path | None = None,
    says: str = "int8",
) -> list[Answer]:
    """Answers to prompts in chunks beside decode rows, with weights held as `says`; with those of `then`,
    loaded in place of them, where that is given."""
    schedule = ScheduleConfig(step_tokens=32, max_running=4)
    beside = Beside(parallel=ParallelConfig(tp=tp), adapters=None if adapter is None else LIMITS)
    cache = CacheConfig(page_size=4, kv_tokens=2048)
    made = build_executor(spec_of(path), path, model, cache, schedule, lambda stage, share: None, beside)
    assert made.capabilities.weight_dtype.startswith("float32" if model is EXACT else says)
    made.prepare(lambda share: None)
    driver = Driver(made, schedule)
    try:
        if then is not None:
            driver.reload(then)
        if adapter is None:
            return driver.run(PROMPTS, PARAMS)
        driver.load("one", adapter)
        return driver.run(PROMPTS, PARAMS, adapters=["one", "", "one"])
    finally:
        driver.close()


def held(path: Path) -> ModelSpec:
    spec = spec_of(path)
    assert choose_int8(spec, ModelConfig(), ON_CPU)
    return msgspec.structs.replace(spec, int8=True)
