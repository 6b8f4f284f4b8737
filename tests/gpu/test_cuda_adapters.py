"""Adapters in graphs on a GPU: texts are a CPU's, and every graph finds what its own work does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from bench.kernels.inputs import error
from core.adapters import TARGETS, AdapterLimits
from core.command import Command, CommandDone
from core.config import CacheConfig, ModelConfig, ScheduleConfig, SpeculativeConfig
from core.plan import StepPlan
from core.request import SamplingParams
from gpu.build import NO_DRAFTS, Beside, Drafting, build_executor, spec_of
from gpu.executor import LocalExecutor
from gpu.step.steps import Forward
from gpu.thread import device_thread
from tests.rigs import lora, tiny_model
from tests.rigs.captured import full, same_text
from tests.rigs.driver import Answer, Driver

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
LIMITS = AdapterLimits(places=3, max_rank=20, host=4, targets=TARGETS)
NAMES = ("", "a", "b", "c", "d")
"""Four adapters for three places, and the base model."""
PROMPTS = [[int(i * 37 % 251) + 3 for i in range(n)] for n in (40, 23, 7, 90, 40, 1, 60, 40, 12, 33)]
GREEDY = [SamplingParams(temperature=0.0, max_tokens=24, logprobs=2)] * len(PROMPTS)
SCHEDULE = ScheduleConfig(step_tokens=128, max_running=8, prefill_weight=0)
NGRAM = Drafting(SpeculativeConfig(algorithm="ngram"))


@pytest.fixture(scope="module", params=["qwen3", "llama-tied-bias", "qwen3-moe-mixed"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(request.param, tmp_path_factory.mktemp(request.param)).path


def executor(
    path: Path, device: str, dtype: str, graphs: bool = True, drafting: Drafting = NO_DRAFTS
) -> LocalExecutor:
    model = ModelConfig(model=str(path), device=device, dtype=dtype)  # type: ignore[arg-type]
    cache = CacheConfig(page_size=16, kv_tokens=4096)
    schedule = msgspec.structs.replace(SCHEDULE, cuda_graphs=graphs)
    beside = Beside(drafting, LIMITS)
    made = build_executor(spec_of(path), path, model, cache, schedule, lambda stage, share: None, beside)
    made.prepare(lambda share: None)
    return made


def adapters(path: Path, root: Path, scale: float = 1.0) -> dict[str, Path]:
    """Adapters of different ranks; `scale` multiplies what they change."""
    found = {}
    for seed, name in enumerate(NAMES[1:], 1):
        rank = 5 * seed
        made = lora.adapter_for(path, TARGETS, rank=rank, seed=seed)
        found[name] = lora.save(made, root / name, alpha=scale * rank, rank=rank)
    return found


def answered(made: LocalExecutor, saved: dict[str, Path], names: Sequence[str]) -> list[Answer]:
    driver = Driver(made, SCHEDULE)
    try:
        for name, directory in saved.items():
            driver.load(name, directory)
        driver.run(PROMPTS, GREEDY, adapters=names[::-1])  # other adapters have had the places
        return driver.run(PROMPTS, GREEDY, adapters=names)
    finally:
        driver.close()


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("drafting", [NO_DRAFTS, NGRAM], ids=["plain", "ngram"])
def test_texts_are_those_of_a_cpu(path: Path, tmp_path: Path, graphs: bool, drafting: Drafting) -> None:
    saved = adapters(path, tmp_path, 0.5)
    names = [NAMES[i % len(NAMES)] for i in range(len(PROMPTS))]
    want = answered(executor(path, "cpu", "float32"), saved, names)
    got = answered(executor(path, DEVICE, "float32", graphs, drafting), saved, names)
    for mine, theirs in zip(got, want, strict=True):
        same_text(mine, theirs)


@contextmanager
def running(path: Path, root: Path, dtype: str) -> Iterator[Any]:
    """The runner of an executor that gets no plans; the test is its launch thread. Adapters are in all
    places but one."""
    made = executor(path, DEVICE, dtype)
    found: Any = made._workers[0]._runner
    with device_thread(found.device):
        for place, (name, directory) in enumerate(list(adapters(path, root, 0.1).items())[:2]):
            for action in ("adapter_read", "adapter_place"):
                command = Command(id=1, action=action, adapter=name, path=str(directory), place=place)
                done = found.carry_out(command)
                assert isinstance(done, Future)
                assert done.result() == CommandDone(1)
        yield found
    made.close()


def adapted(plan: StepPlan) -> StepPlan:
    """Rows have no adapter, the first or the second, in turn."""
    new = tuple(msgspec.structs.replace(each, place=each.slot % 3 - 1) for each in plan.new_slots)
    return msgspec.structs.replace(plan, new_slots=new, adapters=True)


def test_every_graph_is_its_work_bit_by_bit(path: Path, tmp_path: Path) -> None:
    seen = 0
    with running(path, tmp_path, "bfloat16") as runner:
        for key in runner._machine.sizes.all():
            if not isinstance(key, Forward) or not key.adapters:
                continue
            plan = adapted(full(key.tokens, key.chunks > 0, runner.shape.rows))
            found = []
            for launch in (runner._launches[key], lambda key=key: runner._forward(key)):
                runner._rings.write(plan)
                runner._buffers.sample_hidden.fill_(float("nan"))
                launch()
                torch.cuda.synchronize()
                found.append(runner._buffers.sample_hidden[: plan.num_samples].clone())
            assert found[0].isfinite().all(), key
            assert torch.equal(*found), key
            seen += 1
    assert seen > 5


def test_rows_without_an_adapter_are_those_of_a_plain_step(path: Path, tmp_path: Path) -> None:
    """Such rows run in the graphs of adapters, whose products differ from the plain ones in their kernels."""
    found = []
    with running(path, tmp_path, "float32") as runner:
        plan = full(8, False, 8)
        for each in (plan, msgspec.structs.replace(plan, adapters=True)):
            runner._rings.write(each)
            runner._launches[runner._machine.sizes.forward(each)]()
            torch.cuda.synchronize()
            found.append(runner._buffers.sample_hidden[: plan.num_samples].clone())
    assert error(*found) < 5e-3
