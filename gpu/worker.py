"""The two threads of a rank: one launches plans, one waits for what was launched."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Protocol, TypeVar

import torch

from core.command import Command, CommandDone
from core.costs import MeasuredCosts
from core.errors import EngineFailed
from core.mailbox import Mailbox
from core.plan import StepFailure, StepPlan, StepResult
from gpu.thread import device_thread

log = logging.getLogger(__name__)

T = TypeVar("T")

JOIN_SECONDS = 60.0
"""How long `close` waits for a thread: a kernel that hangs must not keep the process."""


Progress = Callable[[float], None]
"""Called with the share that is done, 0 to 1; from any thread."""

Item = StepResult | StepFailure | CommandDone


class Launched(Protocol):
    """A step under way."""

    @property
    def step(self) -> int: ...

    def wait(self) -> StepResult:
        """Block until the step is done."""
        ...


class Runner(Protocol):
    """What the launch thread drives, and owns from then on."""

    @property
    def device(self) -> torch.device: ...

    def prepare(self, progress: Progress) -> MeasuredCosts | None:
        """Capture the launches of steps. Called once, before any other, from the launch thread. Returns what
        steps cost, as far as plans depend on it."""
        ...

    def launch(self, plan: StepPlan) -> Launched:
        """Start a step. Called in plan order, from one thread."""
        ...

    def carry_out(self, command: Command) -> CommandDone | Future[CommandDone]:
        """Do what an operator asked, between steps, from the same thread. The future is of what goes on
        beside the steps that follow."""
        ...

    def close(self) -> None:
        """Give back weights, pages and graphs. Called last, by whoever closes, when no thread is left."""
        ...


class Worker:
    """One rank: plans in, results out, in order.

        plans ──► loom-launch-N ──► launched ──► loom-wait-N ──► post

    The launch thread prepares the runner first. The first exception becomes one `StepFailure`, behind the
    results of the steps before it; every plan after it is dropped. `failed` is shared by all ranks and set
    once, by any thread: seen late, it costs a step whose result is dropped.

    Owner: event loop; the underscored methods say which thread runs them.
    """

    def __init__(
        self, runner: Runner, post: Callable[[Item], None], failed: threading.Event, rank: int
    ) -> None:
        """`post` takes what has ended, from the waiter thread, or from the launch thread when it dies."""
        self._runner = runner
        self._post = post
        self._failed = failed
        self._plans: Mailbox[StepPlan | Command] = Mailbox()
        self._launched: Mailbox[Launched | StepFailure | CommandDone] = Mailbox()
        self._progress: Progress = lambda share: None
        self.prepared: Future[MeasuredCosts | None] = Future()
        """What steps cost, when they can be launched; fails with `EngineFailed` when the launch thread ends
        before."""
        # Daemons: a process that dies for another reason must not hang on a step.
        self._threads = tuple(
            threading.Thread(target=self._run, args=(work,), name=f"loom-{name}-{rank}", daemon=True)
            for name, work in (("launch", self._launch), ("wait", self._wait))
        )

    def start(self, progress: Progress | None = None) -> None:
        """Start both threads; does nothing when they run. `progress` is of the runner's preparation."""
        self._progress = progress or self._progress
        for thread in self._threads:
            if thread.ident is None:
                thread.start()

    def submit(self, plan: StepPlan | Command) -> None:
        """Hand over a plan or a command; never blocks. Raises `Closed` after `close`."""
        self._plans.put(plan)

    def close(self) -> bool:
        """Finish what was submitted, join, and give the device's memory back: another executor may need it in
        this process. Idempotent, and fine before `start`. Returns whether both threads have ended."""
        self._plans.close()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(JOIN_SECONDS)
                if thread.is_alive():
                    log.error("%s does not end: what it waits for is left behind", thread.name)
        # After a failure the device may take no call; the process ends soon, and its memory with it.
        ended = not any(thread.is_alive() for thread in self._threads)
        if ended and not self._failed.is_set():
            self._give_back()
        return ended

    def _give_back(self) -> None:
        try:
            with device_thread(self._runner.device):
                self._runner.close()
            torch.cuda.empty_cache()  # does nothing where no GPU is in use
        except RuntimeError:
            # A device lost since its last step. Whoever closes has streams to end, which need no device.
            log.exception("the device's memory was not given back")

    def _run(self, work: Callable[[], None]) -> None:
        """Run the `work` of either thread. A thread that dies, say because it cannot enter the device, posts
        a failure: others wait for its results."""
        death = self._attempt(-1, work)
        if death is not None:
            self._post(death)
        if work == self._launch:
            self._launched.close()
            if death is not None and not self.prepared.done():
                self.prepared.set_exception(EngineFailed(death.reason))

    def _launch(self) -> None:
        """Launch thread: until the plans end, launch them, or drop them after a failure."""
        with device_thread(self._runner.device):
            self.prepared.set_result(self._runner.prepare(self._progress))
            for plan in self._plans:
                if self._failed.is_set():
                    continue
                if isinstance(plan, Command):
                    # A command is of no step; a failure ends the executor all the same.
                    done = self._attempt(-1, partial(self._runner.carry_out, plan))
                    if isinstance(done, Future):
                        done.add_done_callback(self._post_later)
                    else:
                        self._launched.put(done)
                else:
                    self._launched.put(self._attempt(plan.step, partial(self._runner.launch, plan)))

    def _post_later(self, done: Future[CommandDone]) -> None:
        """Post a command that is carried out, from a thread of the runner's, behind whatever steps."""
        if not done.cancelled():
            self._post(self._attempt(-1, done.result))

    def _wait(self) -> None:
        """Waiter thread: post results until the first failure, which is the last thing posted."""
        with device_thread(self._runner.device):
            posted_failure = False
            for launched in self._launched:
                if posted_failure:
                    if not isinstance(launched, StepFailure | CommandDone):
                        self._attempt(launched.step, launched.wait)  # the launch thread may wait for it too
                    continue
                if isinstance(launched, StepFailure | CommandDone):
                    result: Item = launched
                else:
                    result = self._attempt(launched.step, launched.wait)
                posted_failure = isinstance(result, StepFailure)
                self._post(result)

    def _attempt(self, step: int, act: Callable[[], T]) -> T | StepFailure:
        """The boundary of both threads: whatever a step raises ends here, as data; also what is no
        `Exception`, or the thread would be gone and others would wait for it for ever."""
        try:
            return act()
        except BaseException as error:
            self._failed.set()
            log.exception("step %d failed", step)
            return StepFailure(step, f"{type(error).__name__}: {error}")
