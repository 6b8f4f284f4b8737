"""An executor with real threads and queues, and simulated devices that only take time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from core.command import Command, CommandDone
from core.executor import Capabilities
from core.mailbox import Mailbox, Outbox
from core.plan import StepFailure, StepPlan, StepResult

HOST = 100e-6
"""Seconds of Python in each rank's launch thread per step: the upper bound of the design."""

FIRST_TOKEN = 300
"""Lowest sampled id; ids above it differ from token to token."""


class Rank:
    """A launch thread, a waiter thread, and a simulated device that runs steps back to back.

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
        for plan in self.plans:
            until = time.perf_counter() + HOST
            while time.perf_counter() < until:
                pass  # hold the GIL, as a real launch does
            begin = max(self._busy_until, time.perf_counter())
            self._busy_until = begin + self._seconds
            self._launched.put((plan, self._busy_until))
        self._launched.close()

    def _wait(self) -> None:
        for plan, end in self._launched:
            left = end - time.perf_counter()
            if left > 0:
                time.sleep(left)  # releases the GIL, as an event wait does
            self._done(plan, end)


class PacedExecutor:
    """`ranks` ranks; rank 0 returns results, `ended` collects the end times of its steps.

    Owner: event loop; the ranks' threads only put into queues.
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
        """Capabilities as passed to the constructor."""
        return self._capabilities

    def start(self, wake: Callable[[], None]) -> None:
        """Start every rank's threads."""
        self._outbox.listen(wake)
        for rank in self._ranks:
            for thread in rank.threads:
                thread.start()

    def submit(self, plan: StepPlan) -> None:
        """Send the plan to each rank."""
        for rank in self._ranks:
            rank.plans.put(plan)

    def command(self, command: Command) -> None:
        """Report `command` as done; a simulated device has nothing to do."""
        self._outbox.put(CommandDone(command.id))

    def results(self) -> list[StepResult | StepFailure | CommandDone]:
        """Results of rank 0 since the last call."""
        return self._outbox.drain()

    def close(self) -> None:
        """Finish submitted steps and join the threads."""
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
    """Only rank 0 returns results."""
