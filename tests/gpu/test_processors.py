"""The operator's logit processors: loading them, and their place in a step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from core.config import CacheConfig, ModelConfig, ScheduleConfig
from core.errors import ConfigError
from core.plan import Chunk, NewSlot, StepResult
from core.request import SamplingParams
from gpu.build import build_executor, spec_of
from gpu.executor import LocalExecutor
from gpu.sample.processors import Processors, load_processors
from tests.rigs import tiny_model
from tests.rigs.arrays import ints
from tests.rigs.processors import KNOWN, broken, only
from tests.rigs.runner import CPU, GREEDY, Rig
from tests.rigs.sampler import Sampled, Sampler

VOCAB = 16
HERE = "tests.rigs.processors"


class Step:
    """A sampler without a model."""

    def __init__(self) -> None:
        self.sampler = Sampler(4, VOCAB, CPU, KNOWN)
        self.position = 8

    def new(self, slot: int, params: SamplingParams, output: tuple[int, ...] = ()) -> None:
        self.sampler.apply([NewSlot(slot, params, ints([1, 2]), ints(output), 0)])

    def __call__(self, *slots: int, logits: torch.Tensor | None = None) -> Sampled:
        rows = torch.zeros(len(slots), VOCAB) if logits is None else logits
        rows[:, 5] += 1.0
        self.position += 1
        positions = torch.full((len(slots),), self.position)
        return self.sampler.sample(rows, torch.tensor(slots), positions)


def named(name: str, params: str = "", base: SamplingParams = GREEDY) -> SamplingParams:
    return msgspec.structs.replace(base, processor=name, processor_params=params)


@pytest.fixture
def step() -> Step:
    return Step()


def test_a_row_is_processed_and_its_neighbours_are_not(step: Step) -> None:
    step.new(1, GREEDY)
    step.new(2, named("only", '{"token": 9}'))
    step.new(3, named("only"))
    assert step(1, 2, 3).tokens.tolist() == [5, 9, 0]
    assert step(3, 2, 1).tokens.tolist() == [1, 10, 5], "output_ids did not grow with the tokens"


def test_it_sees_the_output_and_keeps_what_it_likes(step: Step) -> None:
    step.new(1, named("remember"))
    assert [int(step(1).tokens[0]) for _ in range(3)] == [1, 2, 3]
    assert step.sampler.stage._processors._by_slot[1].params["seen"] == [[], [1], [1, 2]]


def test_a_retracted_request_comes_back_with_its_output(step: Step) -> None:
    step.new(1, named("only", '{"token": 3}'))
    first = [int(step(1).tokens[0]) for _ in range(2)]
    step.new(2, named("only", '{"token": 3}'), output=tuple(first))
    assert [*first, int(step(2).tokens[0])] == [3, 4, 5]


def test_a_slots_next_owner_is_not_processed(step: Step) -> None:
    step.new(1, named("only"))
    step(1)
    step.new(1, GREEDY)
    assert step(1).tokens.tolist() == [5]


def test_an_exception_ends_its_row_alone_and_tells_no_secret(step: Step) -> None:
    step.new(1, named("broken"))
    step.new(2, named("only", '{"token": 7}'))
    step.new(3, GREEDY)
    sampled = step(1, 2, 3)
    assert sampled.tokens.tolist() == [-1, 7, 5]
    assert sampled.failed == {0: "The logit processor 'broken' failed: ValueError."}
    again = step(1, 2)  # a step that was already on its way
    assert again.tokens.tolist() == [5, 8]
    assert again.failed == {}


def test_log_probabilities_are_of_what_the_model_said(step: Step) -> None:
    step.new(1, named("only", '{"token": 7}', msgspec.structs.replace(GREEDY, logprobs=1)))
    logprobs = step(1).logprobs[0]
    total = VOCAB - 1 + math.e
    assert math.isclose(logprobs.chosen, -math.log(total), rel_tol=1e-5)
    assert logprobs.top_ids.tolist() == [5]


def test_penalties_and_bias_come_after(step: Step) -> None:
    """A processor that lifts a token to 100 is outweighed by what the request took from it."""
    step.new(1, named("remember", base=msgspec.structs.replace(GREEDY, logit_bias=((1, -100.0),))))
    assert step(1).tokens.tolist() == [5]
    step.new(2, named("remember", base=msgspec.structs.replace(GREEDY, repetition_penalty=100.0)))
    tokens = step(2, logits=torch.full((1, VOCAB), 2.0)).tokens.tolist()
    assert tokens == [5], "token 1 is in the prompt: its 100 is divided by 100"


def test_drawn_rows_draw_from_what_is_left(step: Step) -> None:
    step.new(1, named("only", '{"token": 2}', SamplingParams(temperature=1.0, seed=4)))
    assert [int(step(1).tokens[0]) for _ in range(4)] == [2, 3, 4, 5]


# -- loading ----------------------------------------------------------------------------------------


def test_processors_are_imported_by_name() -> None:
    assert load_processors("") == {}
    assert load_processors(f"a={HERE}:only , b-2={HERE}:broken,") == {"a": only, "b-2": broken}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("only", "NAME=package.module:callable"),
        (f"a={HERE}", "NAME=package.module:callable"),
        (f"a b={HERE}:only", "NAME=package.module:callable"),
        (f"a={HERE}:only,a={HERE}:only", "twice"),
        ("a=no_such_module_here:f", "no_such_module_here"),
        (f"a={HERE}:missing", "missing"),
        (f"a={HERE}:NOT_CALLABLE", "not callable"),
    ],
)
def test_what_cannot_be_loaded_is_the_operators_to_mend(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_processors(text)


# -- in the executor --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build("llama", tmp_path_factory.mktemp("llama")).path


def build(model: Path, processors: str) -> Any:
    def progress(stage: str, share: float) -> None:
        return None

    config = ModelConfig(model=str(model), logit_processor=processors)
    return build_executor(
        spec_of(model), model, config, CacheConfig(kv_tokens=512), ScheduleConfig(max_running=4), progress
    )


def test_an_executor_says_what_it_has_and_a_wrong_flag_is_found_first(model: Path) -> None:
    executor = build(model, f"a={HERE}:only,b={HERE}:broken")
    assert executor.capabilities.processors == ("a", "b")
    executor.close()
    with pytest.raises(ConfigError, match="missing"):
        build(model, f"a={HERE}:missing")


def test_a_step_carries_the_reason(model: Path) -> None:
    rig = Rig(model)
    rig.runner._stage._processors = Processors(KNOWN)
    rows = {1: GREEDY, 2: named("broken"), 3: named("only", '{"token": 40}')}
    chunks = [Chunk(slot, 0, ints([5, 7, slot]), True) for slot in rows]
    new = [rig.new(slot, [5, 7, slot], params=params) for slot, params in rows.items()]
    result = rig.step(chunks=chunks, new=new)
    assert result.tokens[0] >= 0
    assert result.tokens[1:].tolist() == [-1, 40]
    assert list(result.failed) == [1]
    assert np.array_equal(rig.step(decode=[3]).tokens, [41])


def test_a_processor_knows_every_token_however_far_ahead_steps_are(model: Path) -> None:
    """Three steps are handed over at once: each waits for the tokens of the one before it."""
    rig = Rig(model)
    rig.runner._stage._processors = Processors(KNOWN)
    rows = {1: GREEDY, 2: named("only", '{"token": 40}')}
    chunks = [Chunk(slot, 0, ints([5, 7, slot]), True) for slot in rows]
    new = [rig.new(slot, [5, 7, slot], params=params) for slot, params in rows.items()]
    plans = [rig.plan(chunks=chunks, new=new), rig.plan(decode=[2, 1]), rig.plan(decode=[1, 2])]
    executor = LocalExecutor([rig.runner], build(model, "").capabilities)
    executor.start(lambda: None)
    for plan in plans:
        executor.submit(plan)
    executor.close()
    results = [result for result in executor.results() if isinstance(result, StepResult)]
    assert [int(result.tokens[row]) for result, row in zip(results, (1, 0, 1), strict=True)] == [40, 41, 42]
