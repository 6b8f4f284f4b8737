"""The threads of an executor: order, failure, close."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

import pytest
import torch

from core.command import Command
from core.errors import EngineFailed
from core.executor import Capabilities
from core.mailbox import Closed
from core.plan import StepFailure, StepPlan, StepResult
from core.types import NO_TOKENS
from gpu import worker
from gpu.executor import LocalExecutor
from gpu.thread import assert_device_thread, device_thread
from gpu.worker import Progress

CPU = torch.device("cpu")
CAPS = Capabilities(num_pages=2, page_size=1, max_rows=1, context_length=1, vocab_size=1, max_step_tokens=1)


class Step:
    """A launched step that waits for its gate, and may then fail."""

    def __init__(self, step: int, gate: threading.Event, fails: bool, seen: list[str]) -> None:
        self.step, self.gate, self.fails, self.seen = step, gate, fails, seen

    def wait(self) -> StepResult:
        self.gate.wait()
        assert_device_thread(CPU)
        self.seen.append(threading.current_thread().name)
        if self.fails:
            raise ValueError("late")
        return StepResult(self.step, NO_TOKENS)


class ScriptedRunner:
    """Fails in launch or wait at the given steps, or when closed; records who called."""

    device = CPU

    def __init__(self, fail_launch: int = -1, fail_wait: int = -1, fail_close: bool = False) -> None:
        self.fail_launch, self.fail_wait, self.fail_close = fail_launch, fail_wait, fail_close
        self.gate = threading.Event()
        self.third = threading.Event()
        self.launched: list[int] = []
        self.threads: list[str] = []
        self.closed_among: list[threading.Thread] | None = None

    def prepare(self, progress: Progress) -> None:
        assert_device_thread(CPU)
        self.threads.append(threading.current_thread().name)
        progress(1.0)

    def close(self) -> None:
        assert_device_thread(CPU)
        self.closed_among = threading.enumerate()
        if self.fail_close:
            raise RuntimeError("the device is lost")

    def launch(self, plan: StepPlan) -> Step:
        assert_device_thread(CPU)
        self.launched.append(plan.step)
        self.threads.append(threading.current_thread().name)
        if len(self.launched) == 3:
            self.third.set()
        if plan.step == self.fail_launch:
            raise RuntimeError("boom")
        return Step(plan.step, self.gate, plan.step == self.fail_wait, self.threads)


def run(runner: ScriptedRunner, steps: int) -> list[StepResult | StepFailure]:
    """Submit plans 0 ... steps - 1, let them finish, close, and collect."""
    executor = LocalExecutor([runner], CAPS)
    executor.start(lambda: None)
    for step in range(steps):
        executor.submit(StepPlan(step, NO_TOKENS))
    runner.gate.set()
    executor.close()
    return executor.results()


def test_results_come_in_order_and_once() -> None:
    runner = ScriptedRunner()
    results = run(runner, 20)
    assert [result.step for result in results] == list(range(20))
    assert set(runner.threads) == {"loom-launch-0", "loom-wait-0"}


def test_steps_are_launched_ahead_of_results() -> None:
    runner = ScriptedRunner()
    executor = LocalExecutor([runner], CAPS)
    executor.start(lambda: None)
    for step in range(3):
        executor.submit(StepPlan(step, NO_TOKENS))
    assert runner.third.wait(10)
    assert executor.results() == []
    runner.gate.set()
    executor.close()
    assert len(executor.results()) == 3


def test_wake_is_called_and_then_there_is_something() -> None:
    woken = threading.Event()
    runner = ScriptedRunner()
    runner.gate.set()
    executor = LocalExecutor([runner], CAPS)
    executor.start(woken.set)
    executor.submit(StepPlan(4, NO_TOKENS))
    assert woken.wait(10)
    assert [result.step for result in executor.results()] == [4]
    executor.close()


def test_a_failed_launch_is_one_failure_behind_earlier_results() -> None:
    runner = ScriptedRunner(fail_launch=2)
    results = run(runner, 6)
    assert [result.step for result in results] == [0, 1, 2]
    failure = results[-1]
    assert isinstance(failure, StepFailure) and failure.reason == "RuntimeError: boom"
    assert runner.launched == [0, 1, 2]


def test_a_failed_wait_is_the_last_thing_heard() -> None:
    results = run(ScriptedRunner(fail_wait=1), 6)
    assert [type(result) for result in results] == [StepResult, StepFailure]


def test_what_was_launched_behind_a_failure_is_waited_for() -> None:
    """The end of a later launch may be what the launch thread waits for: masks follow the tokens of the step
    before."""
    runner = ScriptedRunner(fail_wait=0)
    executor = LocalExecutor([runner], CAPS)
    executor.start(lambda: None)
    for step in range(3):
        executor.submit(StepPlan(step, NO_TOKENS))
    assert runner.third.wait(10)
    runner.gate.set()
    executor.close()
    assert [type(result) for result in executor.results()] == [StepFailure]
    assert runner.threads.count("loom-wait-0") == 3


def test_ranks_are_prepared_on_their_launch_threads_before_anything_else() -> None:
    ranks, shares = [ScriptedRunner(), ScriptedRunner()], list[float]()
    executor = LocalExecutor(ranks, CAPS)
    executor.prepare(shares.append)
    assert [rank.threads for rank in ranks] == [["loom-launch-0"], ["loom-launch-1"]]
    assert shares == [1.0, 1.0]
    executor.start(lambda: None)
    executor.submit(StepPlan(0, NO_TOKENS))
    for rank in ranks:
        rank.gate.set()
    executor.close()
    assert [result.step for result in executor.results()] == [0]
    assert [rank.threads.count(f"loom-launch-{i}") for i, rank in enumerate(ranks)] == [2, 2]


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_rank_that_cannot_be_prepared_is_an_error_and_leaves_no_thread(lacking: int) -> None:
    def prepare(progress: Progress) -> None:
        raise RuntimeError("out of memory")

    ranks = [ScriptedRunner(), ScriptedRunner()]
    ranks[lacking].prepare = prepare  # type: ignore[method-assign]
    before = set(threading.enumerate())  # other tests leave threads that hang
    executor = LocalExecutor(ranks, CAPS)
    with pytest.raises(EngineFailed, match="RuntimeError: out of memory"):
        executor.prepare(lambda share: None)
    assert set(threading.enumerate()) <= before


def test_close_is_idempotent_and_fine_before_start() -> None:
    executor = LocalExecutor([ScriptedRunner()], CAPS)
    executor.close()
    executor.close()
    with pytest.raises(Closed):
        executor.submit(StepPlan(0, NO_TOKENS))
    assert executor.capabilities is CAPS


def test_a_runner_is_closed_when_no_thread_is_left_that_could_use_it() -> None:
    runner, before = ScriptedRunner(), set(threading.enumerate())
    run(runner, 3)
    assert runner.closed_among is not None
    assert set(runner.closed_among) <= before


def test_a_runner_that_failed_is_left_alone() -> None:
    """The runner's device may take no call any more."""
    runner = ScriptedRunner(fail_launch=1)
    run(runner, 3)
    assert runner.closed_among is None


def test_a_device_that_was_lost_meanwhile_does_not_keep_others_from_closing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = ScriptedRunner(fail_close=True)
    assert len(run(runner, 3)) == 3
    assert runner.closed_among is not None
    assert "not given back" in caplog.text and "lost" in caplog.text


def test_a_thread_that_did_not_enter_is_refused() -> None:
    with pytest.raises(RuntimeError, match="device_thread"):
        assert_device_thread(CPU)


def test_an_order_that_raises_ends_the_executor() -> None:
    runner = ScriptedRunner()
    runner.carry_out = lambda command: {}[command]  # type: ignore[attr-defined]
    executor = LocalExecutor([runner], CAPS)  # type: ignore[arg-type]
    executor.start(lambda: None)
    executor.command(Command(id=1, action="sleep"))
    executor.submit(StepPlan(0, NO_TOKENS))
    executor.close()
    (failure,) = executor.results()
    assert isinstance(failure, StepFailure) and failure.reason.startswith("KeyError")
    assert runner.launched == []


def test_a_step_that_never_ends_does_not_keep_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gpu.worker.JOIN_SECONDS", 0.05)
    runner = ScriptedRunner()
    executor = LocalExecutor([runner], CAPS)  # type: ignore[arg-type]
    executor.start(lambda: None)
    executor.submit(StepPlan(0, NO_TOKENS))
    executor.close()
    assert "loom-wait-0 does not end" in caplog.text
    assert runner.closed_among is None
    runner.gate.set()


@pytest.mark.parametrize("name", ["loom-launch-0", "loom-wait-0"])
def test_a_thread_that_cannot_enter_its_device_is_a_failure(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def enter(device: torch.device) -> AbstractContextManager[None]:
        if threading.current_thread().name == name:
            raise RuntimeError("no such device")
        return device_thread(device)

    monkeypatch.setattr(worker, "device_thread", enter)
    (failure,) = run(ScriptedRunner(), 0)
    assert isinstance(failure, StepFailure) and failure.reason == "RuntimeError: no such device"
