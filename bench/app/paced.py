"""An executor of fake ranks: real threads, real hand-over, and a device that only takes time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from core.command import Command, CommandDone
from core.executor import Capabilities
from core.mailbox import Closed, Mailbox, Outbox
from core.plan import StepFailure, StepPlan, StepResult

HOST = 100e-6
"""Seconds of Python each rank's launch thread spends per step: the design's bound."""

FIRST_TOKEN = 300
"""Sampled ids run from here upwards, so that texts differ from token to token."""


class Rank:
    """A launch thread and a waiter thread, and a device that runs steps back to back.

    Owner of `_busy_until`: the launch thread. `done(plan, started, ended)` is called by the waiter.
    """

    def __init__(self, index: int, seconds: float, done: Callable[[StepPlan, float], None]) -> None:
        self.plans: Mailbox[StepPlan] = Mailbox()
        self._launched: Mailbox[tuple[StepPlan, float]] = Mailbox()
        self._seconds = seconds
        self._done = done
        self._busy_until = 0.0
        self.threads = (
            threading.Thread(target=self._launch, name=f"rank-{index}", daemon=True),
            threading.Thread(target=self._wait, name=f"rank-{index}-wait", daemon=True),
        )

    def _launch(self) -> None:
        try:
            while True:
                plan = self.plans.take()
                until = time.perf_counter() + HOST
                while time.perf_counter() < until:
                    pass  # Python, with the GIL, as a launch is
                begin = max(self._busy_until, time.perf_counter())
                self._busy_until = begin + self._seconds
                self._launched.put((plan, self._busy_until))
        except Closed:
            self._launched.close()

    def _wait(self) -> None:
        try:
            while True:
                plan, end = self._launched.take()
                left = end - time.perf_counter()
                if left > 0:
                    time.sleep(left)  # the GIL is released, as in an event wait
                self._done(plan, end)
        except Closed:
            return


class PacedExecutor:
    """`ranks` of them; rank 0 answers, `ended` collects when its device ended each step.

    Owner: event loop; the ranks' threads only post.
    """

    def __init__(self, capabilities: Capabilities, seconds: float, ranks: int = 1) -> None:
        self._capabilities = capabilities
        self._outbox: Outbox[StepResult | StepFailure | CommandDone] = Outbox()
        self._vocab = capabilities.vocab_size
        self.ended: list[float] = []
        self._ranks = [
            Rank(index, seconds, self._answer if index == 0 else _ignore) for index in range(ranks)
        ]

    @property
    def capabilities(self) -> Capabilities:
        """What was asked for."""
        return self._capabilities

    def start(self, wake: Callable[[], None]) -> None:
        """Start every rank's threads."""
        self._outbox.wake = wake
        for rank in self._ranks:
            for thread in rank.threads:
                thread.start()

    def submit(self, plan: StepPlan) -> None:
        """The same plan to each rank."""
        for rank in self._ranks:
            rank.plans.put(plan)

    def command(self, command: Command) -> None:
        """Nothing to do for a device that is not there."""
        self._outbox.put(CommandDone(command.id))

    def results(self) -> list[StepResult | StepFailure | CommandDone]:
        """What rank 0 has answered."""
        return self._outbox.drain()

    def close(self) -> None:
        """Finish and join."""
        for rank in self._ranks:
            rank.plans.close()
        for rank in self._ranks:
            for thread in rank.threads:
                thread.join()

    def _answer(self, plan: StepPlan, ended: float) -> None:
        self.ended.append(ended)
        ids = FIRST_TOKEN + (np.arange(plan.num_samples) * 7 + plan.step) % (self._vocab - FIRST_TOKEN)
        self._outbox.put(StepResult(plan.step, ids.astype(np.int32)))


def _ignore(plan: StepPlan, ended: float) -> None:
    """Ranks other than the first have nothing to say."""
