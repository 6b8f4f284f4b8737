"""Several ranks on a CPU, each with a part of the model, say what one rank says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.config import CacheConfig, ModelConfig, ScheduleConfig
from core.errors import ConfigError
from core.request import SamplingParams
from gpu.build import NOTHING_BESIDE, Beside, build_executor, choose_ranks, spec_of
from gpu.device import CudaFacts
from gpu.executor import LocalExecutor
from gpu.parts import Target
from tests.rigs import tiny_model
from tests.rigs.driver import Answer, Driver

PROMPTS = [[int(i * 37 % 241) + 3 for i in range(n)] for n in (40, 23, 150, 40)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, prompt_logprobs_start=0, prompt_logprobs=1),
    SamplingParams(temperature=0.9, seed=5, max_tokens=30, presence_penalty=0.5),
    SamplingParams(temperature=0.7, top_p=0.8, seed=6, max_tokens=7),
    SamplingParams(temperature=0.0, max_tokens=9),
]


def build(path: Path, tp: int, schedule: ScheduleConfig, beside: Beside = NOTHING_BESIDE) -> LocalExecutor:
    config = ModelConfig(device="cpu", tp=tp)
    cache = CacheConfig(page_size=4, kv_tokens=1024)
    made = build_executor(spec_of(path), path, config, cache, schedule, lambda stage, share: None, beside)
    made.prepare(lambda share: None)
    return made


def answers(path: Path, tp: int, depth: int = 1) -> list[Answer]:
    """Twice: the second time prefixes are cached."""
    schedule = ScheduleConfig(step_tokens=64, max_running=4, overlap_depth=depth)
    driver = Driver(build(path, tp, schedule), schedule)
    found = [answer for _ in range(2) for answer in driver.run(PROMPTS, PARAMS)]
    driver.close()
    return found


@pytest.mark.parametrize(
    ("name", "tp", "more"),
    [
        ("llama", 2, {}),
        ("llama", 4, {"vocab_size": 253}),
        ("llama-tied-bias", 2, {"vocab_size": 251}),
        ("qwen2", 4, {}),
        ("qwen3", 2, {}),
        ("qwen3-moe-mixed", 2, {}),
        ("qwen3-moe", 4, {}),
    ],
)
def test_text_is_that_of_one_rank(name: str, tp: int, more: dict[str, int], tmp_path: Path) -> None:
    path = tiny_model.build(name, tmp_path, **more).path
    for one, several in zip(answers(path, 1), answers(path, tp), strict=True):
        assert several.tokens == one.tokens
        assert several.logprobs == pytest.approx(one.logprobs, abs=1e-4)


def test_gpus_are_refused() -> None:
    cuda = Target(torch.device("cuda"), torch.bfloat16, CudaFacts("", "NVIDIA H200", (9, 0)))
    assert choose_ranks(1, cuda) == (None, [None])
    with pytest.raises(ConfigError, match="--tp 2: several ranks run on a CPU"):
        choose_ranks(2, cuda)


def test_sizes_that_do_not_divide_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    path = tiny_model.build("llama", tmp_path).path
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"--tp 3 does not divide num_attention_heads \(4\)"):
        build(path, 3, ScheduleConfig())
