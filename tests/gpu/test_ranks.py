"""Two ranks on one CPU, each with the whole model: the same answers as one, and one fate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from core.command import Command, CommandDone
from core.config import ScheduleConfig
from core.executor import Capabilities
from core.plan import Chunk, NewSlot, PageWrites, StepFailure, StepPlan, StepResult
from core.request import SamplingParams
from core.types import NO_TOKENS
from gpu.attention import torch_attention
from gpu.build import spec_of
from gpu.executor import LocalExecutor
from gpu.kv.pool import KvPool
from gpu.maintenance import Maintenance
from gpu.models.base import CausalModel
from gpu.ops.plain import TorchOps
from gpu.runner import ModelRunner
from gpu.sample import torch_kernels
from gpu.state.entry import EntryWriter
from gpu.step.begin import begin_step
from gpu.step.buffers import HiddenShape
from gpu.step.launched import LaunchedStep
from gpu.step.machine import Machine
from gpu.step.shape import Shape
from gpu.step.steps import ExactSizes
from gpu.thread import device_thread
from gpu.weights import load_model
from gpu.worker import Progress
from tests.rigs import tiny_model
from tests.rigs.arrays import ints
from tests.rigs.driver import Driver
from tests.rigs.runner import CPU, GREEDY

PAGES, PAGE, ROWS, TOKENS = 33, 16, 4, 128
SIZES = Capabilities(
    num_pages=PAGES, page_size=PAGE, max_rows=ROWS, context_length=256, vocab_size=tiny_model.VOCAB,
    max_step_tokens=TOKENS,
)  # fmt: skip
PROMPT = ints(range(3, 13))


class Rank:
    """A runner that keeps its answers; launching `fail_at` raises."""

    device = CPU

    def __init__(self, runner: ModelRunner, fail_at: int = -1) -> None:
        self.runner, self.fail_at = runner, fail_at
        self.answers: list[StepResult] = []

    def prepare(self, progress: Progress) -> None:
        self.runner.prepare(progress)

    def launch(self, plan: StepPlan) -> Watched:
        if plan.step == self.fail_at:
            raise RuntimeError("rank lost")
        return Watched(self, self.runner.launch(plan))

    def carry_out(self, command: Command) -> CommandDone:
        return self.runner.carry_out(command)

    def close(self) -> None:
        self.runner.close()


class Watched:
    """A launched step of a rank."""

    def __init__(self, rank: Rank, launched: LaunchedStep) -> None:
        self.step, self._rank, self._launched = launched.step, rank, launched

    def wait(self) -> StepResult:
        self._rank.answers.append(self._launched.wait())
        return self._rank.answers[-1]


def make(path: Path, count: int) -> list[Rank]:
    """`count` ranks over one ring of entries."""
    spec = spec_of(path)
    width = HiddenShape(spec.hidden, torch.float32)
    shape = Shape(ROWS, TOKENS, ROWS, PAGES, PAGE, spec.vocab_size, width)
    entries = shape.entries(CPU)

    def load(path: str) -> CausalModel:
        model = load_model(spec, Path(path), torch.float32, CPU)
        model.seal()
        return model

    def pool() -> KvPool:
        return KvPool(spec.kv_layers, PAGES, PAGE, spec.kv_shape, torch.float32, CPU)

    def rank() -> Rank:
        attention = torch_attention(spec)
        machine = Machine(
            CPU, ExactSizes(), None, attention, lambda pool: lambda view: TorchOps(view, attention),
            begin_step, torch_kernels,
        )  # fmt: skip
        runner = ModelRunner(shape, machine, entries, maintenance=Maintenance(str(path), load, pool))
        runner.use_model(load(str(path)))
        runner.use_pool(pool())
        return Rank(runner)

    with device_thread(CPU):
        return [rank() for _ in range(count)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build("llama", tmp_path_factory.mktemp("llama")).path


def prefill(step: int) -> StepPlan:
    """The prompt in slot 1 on pages 1 and 2; yields its first token."""
    writes = PageWrites(ints([1, 1]), ints([0, 1]), ints([1, 2]))
    new = NewSlot(1, GREEDY, PROMPT, NO_TOKENS, 0)
    return StepPlan(step, NO_TOKENS, (Chunk(1, 0, PROMPT, True),), (new,), writes)


def play(ranks: list[Rank], *work: StepPlan | Command) -> list[Any]:
    """Submit everything at once, close, and take what came."""
    executor = LocalExecutor(ranks, SIZES)
    executor.start(lambda: None)
    for item in work:
        if isinstance(item, Command):
            executor.command(item)
        else:
            executor.submit(item)
    executor.close()
    return executor.results()


def tokens(results: list[Any]) -> list[list[int]]:
    return [result.tokens.tolist() for result in results if isinstance(result, StepResult)]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_two_ranks_answer_as_one_from_entries_written_once(
    path: Path, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[int] = []
    write = EntryWriter.write

    def counted(self: EntryWriter, plan: StepPlan, words: Any) -> Any:
        plans.append(plan.step)
        return write(self, plan, words)

    monkeypatch.setattr(EntryWriter, "write", counted)
    params = [
        SamplingParams(temperature=0.0, max_tokens=12, logprobs=1),
        SamplingParams(temperature=0.9, seed=5, max_tokens=30, presence_penalty=0.5),
        SamplingParams(temperature=0.7, top_p=0.8, seed=6, max_tokens=7),
    ]
    prompts = [[int(i * 37 % 251) + 3 for i in range(n)] for n in (40, 23, 150)]
    texts = []
    for count in (1, 2):
        ranks = make(path, count)
        driver = Driver(LocalExecutor(ranks, SIZES), ScheduleConfig(step_tokens=TOKENS, overlap_depth=depth))
        plans.clear()
        texts.append([answer.tokens for answer in driver.run(prompts, params)])
        driver.close()
        assert len(plans) == len(set(plans)) == len(ranks[0].answers)
        assert tokens(ranks[0].answers) == tokens(ranks[-1].answers)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_failure_of_either_rank_ends_both(path: Path, lost: int) -> None:
    ranks = make(path, 2)
    ranks[lost].fail_at = 1
    *answered, failure = play(ranks, prefill(0), prefill(1), prefill(2))
    assert failure == StepFailure(1, "RuntimeError: rank lost")
    assert tokens(answered) == tokens(ranks[0].answers)[: len(answered)]


def test_commands_reach_both_ranks(path: Path, tmp_path: Path) -> None:
    reference = tiny_model.build("llama", tmp_path).reference
    with_zero = {name: tensor.clone().zero_() for name, tensor in reference.state_dict().items()}
    reference.save_pretrained(tmp_path, state_dict=with_zero)
    ranks = make(path, 2)
    results = play(
        ranks,
        prefill(0),
        Command(id=1, action="load_weights", path=str(tmp_path)),
        prefill(1),
        Command(id=2, action="sleep"),
        Command(id=3, action="wake"),
        prefill(2),
    )
    assert [result for result in results if isinstance(result, CommandDone)] == [
        CommandDone(1), CommandDone(2), CommandDone(3)
    ]  # fmt: skip
    (before,), *after = tokens(results)
    assert before != 0
    assert after == [[0], [0]]  # all logits are equal: the lowest id
    assert tokens(ranks[0].answers) == tokens(ranks[1].answers)


def test_a_command_that_every_rank_refuses_leaves_all_as_they_were(path: Path, tmp_path: Path) -> None:
    command = Command(id=1, action="load_weights", path=str(tmp_path))
    first, refused, second = play(make(path, 2), prefill(0), command, prefill(1))
    assert isinstance(refused, CommandDone) and refused.error is not None
    assert first.tokens.tolist() == second.tokens.tolist()


def test_a_command_that_one_rank_refuses_is_a_failure(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks' weights differ then."""
    ranks = make(path, 2)
    monkeypatch.setattr(ranks[1].runner._maintenance, "_load", lambda path: {}[path])
    *_, failure = play(ranks, prefill(0), Command(id=1, action="load_weights", path=str(path)), prefill(1))
    assert isinstance(failure, StepFailure) and "is damaged: KeyError" in failure.reason


def test_a_step_is_answered_when_every_rank_has_ended_it(path: Path) -> None:
    executor = LocalExecutor(make(path, 2), SIZES)
    first, second = (StepResult(step, NO_TOKENS) for step in (0, 1))
    for item in (first, second):
        executor._post(0, item)
    assert executor.results() == []
    executor._post(1, StepResult(0, ints([9])))
    assert executor.results() == [first]
    executor._post(1, StepFailure(1, "late"))
    executor._post(0, StepFailure(1, "later"))
    assert executor.results() == [StepFailure(1, "late")]
