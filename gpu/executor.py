"""`core.executor.Executor` over one device of this host."""

from __future__ import annotations

from collections.abc import Callable

from core.command import Command, CommandDone
from core.executor import Capabilities
from core.mailbox import Outbox
from core.plan import StepFailure, StepPlan, StepResult
from gpu.worker import Runner, Worker


class LocalExecutor:
    """One worker behind the seam.

    Owner: event loop. See `core.executor.Executor` for what each method promises.
    """

    __slots__ = ("_capabilities", "_outbox", "_worker")

    def __init__(self, runner: Runner, capabilities: Capabilities) -> None:
        self._capabilities = capabilities
        self._outbox: Outbox[StepResult | StepFailure | CommandDone] = Outbox()
        self._worker = Worker(runner, self._outbox)

    @property
    def capabilities(self) -> Capabilities:
        """What the runner was built to hold."""
        return self._capabilities

    def start(self, wake: Callable[[], None]) -> None:
        """Start the threads; `wake` is called from the waiter thread."""
        self._outbox.wake = wake
        self._worker.start()

    def submit(self, plan: StepPlan) -> None:
        """Queue a plan. Raises `core.mailbox.Closed` after `close`."""
        self._worker.submit(plan)

    def command(self, command: Command) -> None:
        """Queue a command behind the plans submitted so far."""
        self._worker.submit(command)

    def results(self) -> list[StepResult | StepFailure | CommandDone]:
        """What has arrived since the last call."""
        return self._outbox.drain()

    def close(self) -> None:
        """Finish, then join."""
        self._worker.close()
