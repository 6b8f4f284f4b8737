"""Tensor parallelism on GPUs: text equals a CPU's, ranks sample the same tokens, one failure stops all."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import Literal

import msgspec
import pytest
import torch

from core.adapters import TARGETS, AdapterLimits
from core.config import CacheConfig, ModelConfig, ParallelConfig, ScheduleConfig, SpeculativeConfig
from core.plan import StepFailure, StepPlan
from core.request import SamplingParams
from gpu.build import NO_DRAFTS, NOTHING_BESIDE, Beside, Drafting, build_executor, spec_of
from gpu.executor import LocalExecutor
from tests.rigs import lora, tiny_model
from tests.rigs.captured import full, same_text
from tests.rigs.driver import Answer, Driver
from tests.rigs.wait import PATIENCE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

STEPS = int(os.environ.get("LOOM_RANDOM_STEPS", "2000"))
"""Number of steps with random batches."""

SCHEDULE = ScheduleConfig(step_tokens=128, max_running=8, prefill_weight=0)
LIMITS = AdapterLimits(places=2, max_rank=8, host=4, targets=TARGETS)
NGRAM = Drafting(SpeculativeConfig(algorithm="ngram"))
PROMPTS = [[int(i * 37 % 241) + 3 for i in range(n)] for n in (40, 23, 200, 40, 1, 7)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, logprobs=2, prompt_logprobs_start=0, prompt_logprobs=1),
    SamplingParams(temperature=0.9, seed=5, max_tokens=30, presence_penalty=0.5, logprobs=2),
    SamplingParams(temperature=0.7, top_p=0.8, seed=6, max_tokens=7, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=9, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=20, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=20, logprobs=2, logit_bias=((7, 3.0),)),
]
NAMES = ["a", "", "b", "c", "a", "b"]


def executor(
    path: Path,
    device: Literal["cpu", "cuda"],
    dtype: Literal["float32", "bfloat16"] = "float32",
    graphs: bool = True,
    beside: Beside = NOTHING_BESIDE,
) -> LocalExecutor:
    model = ModelConfig(model=str(path), device=device, dtype=dtype)
    cache = CacheConfig(page_size=16, kv_tokens=8192)
    schedule = msgspec.structs.replace(SCHEDULE, cuda_graphs=graphs)
    if device == "cuda":
        beside = beside._replace(parallel=ParallelConfig(tp=2))
    made = build_executor(spec_of(path), path, model, cache, schedule, lambda stage, share: None, beside)
    made.prepare(lambda share: None)
    return made


def answered(made: LocalExecutor, saved: dict[str, Path]) -> list[Answer]:
    """Twice: the second time prefixes are cached."""
    driver = Driver(made, SCHEDULE)
    try:
        for name, directory in saved.items():
            driver.load(name, directory)
        names = NAMES if saved else [""] * len(PROMPTS)
        return [each for _ in range(2) for each in driver.run(PROMPTS, PARAMS, adapters=names)]
    finally:
        driver.close()


@pytest.mark.parametrize("beside", ["plain", "eager", "adapters", "ngram"])
@pytest.mark.parametrize(
    "name", ["gemma2", "qwen3", "llama-tied-bias", "olmo3", "deepseek-v3", "qwen3-moe-mixed"]
)
def test_texts_are_those_of_a_cpu(name: str, beside: str, tmp_path: Path) -> None:
    path = tiny_model.build(name, tmp_path / "model", vocab_size=251).path
    saved = {}
    if beside == "adapters":
        for seed, adapter in enumerate("abc", 1):
            made = lora.adapter_for(path, TARGETS, rank=2 * seed, seed=seed)
            saved[adapter] = lora.save(made, tmp_path / adapter, alpha=seed, rank=2 * seed)
    more = Beside(NGRAM if beside == "ngram" else NO_DRAFTS, LIMITS if saved else None)
    want = answered(executor(path, "cpu", beside=more), saved)
    got = answered(executor(path, "cuda", graphs=beside != "eager", beside=more), saved)
    for mine, theirs in zip(got, want, strict=True):
        same_text(mine, theirs)


def test_ranks_agree_whatever_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random batches in bfloat16, with and without prefill; both ranks' tokens are compared every step."""
    monkeypatch.setattr("gpu.executor.COMPARED", 1)
    made = executor(tiny_model.build("qwen3", tmp_path).path, "cuda", "bfloat16")
    driver, rng, done = Driver(made, SCHEDULE), random.Random(0), 0
    try:
        while done < STEPS:
            rows = rng.randrange(1, 13)
            prompts = [[rng.randrange(3, 250) for _ in range(rng.randrange(1, 200))] for _ in range(rows)]
            params = [SamplingParams(seed=i, max_tokens=rng.randrange(1, 40)) for i in range(rows)]
            found = driver.run(prompts, params)
            assert [len(each.tokens) for each in found] == [each.max_tokens for each in params]
            done += max(each.max_tokens for each in params)
    finally:
        driver.close()


def test_a_rank_that_fails_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of the other one wait for it meanwhile."""
    made, arrived = executor(tiny_model.build("qwen3", tmp_path).path, "cuda"), threading.Event()

    def fail(plan: StepPlan) -> None:
        raise ValueError("a rank is gone")

    monkeypatch.setattr(made._workers[1]._runner, "launch", fail)
    made.start(arrived.set)
    made.submit(full(4, False, 8))
    assert arrived.wait(PATIENCE)
    (found,) = made.results()
    assert isinstance(found, StepFailure) and "a rank is gone" in found.reason
    made.close()
