"""Another node as node 0's executor sees it: like the two threads of a rank, one sends, one receives."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

from core.command import Command
from core.costs import MeasuredCosts
from core.errors import EngineFailed
from core.mailbox import Mailbox
from core.plan import StepFailure, StepPlan, StepResult
from gpu.nodes.channel import Channel, NodeLost
from gpu.nodes.wire import CommandMessage, CommandReply, End, Failed, Ready, StepDone, step_of
from gpu.worker import JOIN_SECONDS, Item, Progress

log = logging.getLogger(__name__)


class RemoteNode:
    """See `gpu.executor.PlanWorker`. A connection that ends is a failure, unless the node was told to end.

    Owner: event loop; the underscored methods say which thread runs them.
    """

    def __init__(self, channel: Channel, post: Callable[[Item], None], failed: threading.Event) -> None:
        """`post` takes what all ranks of the node have ended, from the receiving thread; `failed` is shared
        by all ranks."""
        self._channel, self._post, self._failed = channel, post, failed
        self._plans: Mailbox[StepPlan | Command] = Mailbox()
        self._ending = False
        self.prepared: Future[MeasuredCosts | None] = Future()
        """None when its ranks can launch steps; rank 0 measures."""
        self._threads = tuple(
            threading.Thread(target=self._run, args=(work,), name=f"loom-{name}-node", daemon=True)
            for name, work in (("send", self._send), ("receive", self._receive))
        )

    def start(self, progress: Progress | None = None) -> None:
        """Start both threads; does nothing when they run. The node began to prepare when it had loaded."""
        for thread in self._threads:
            if thread.ident is None:
                thread.start()

    def submit(self, plan: StepPlan | Command) -> None:
        """Queue a plan or a command; never blocks. Raises `core.mailbox.Closed` after `close`."""
        self._plans.put(plan)

    def close(self) -> bool:
        """Have the node finish what was submitted, and end. After a failure it is left at once. Idempotent.
        Returns whether both threads have ended."""
        self._plans.close()
        if self._failed.is_set():
            self._channel.hang_up()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(JOIN_SECONDS)
        if any(thread.is_alive() for thread in self._threads):
            log.error("%s does not end", self._channel.name)
            return False
        self._channel.close()
        return True

    def _run(self, work: Callable[[], None]) -> None:
        """Run either thread. Any exception is reported as a lost node, because the executor waits for the
        node's results."""
        try:
            work()
        except BaseException as error:
            if self._ending and isinstance(error, NodeLost):
                return
            self._failed.set()
            reason = str(error) if isinstance(error, NodeLost) else f"{type(error).__name__}: {error}"
            log.error("%s", reason)
            self._channel.hang_up()  # the other thread ends, too
            self._post(StepFailure(-1, reason))
            if not self.prepared.done():
                self.prepared.set_exception(EngineFailed(reason))

    def _send(self) -> None:
        """Sending thread: until the plans end."""
        for plan in self._plans:
            if not self._failed.is_set():
                self._channel.send(CommandMessage(plan) if isinstance(plan, Command) else step_of(plan))
        if self._failed.is_set():
            self._channel.hang_up()
        else:
            self._ending = True
            self._channel.send(End())

    def _receive(self) -> None:
        """Receiving thread: until the node closes its connection."""
        while True:
            match self._channel.receive():
                case Ready():
                    self.prepared.set_result(None)
                case StepDone(step, tokens):
                    self._post(StepResult(step, tokens))
                case CommandReply(done):
                    self._post(done)
                case Failed(reason):
                    raise NodeLost(f"{self._channel.name}: {reason}")
                case other:
                    raise NodeLost(f"{self._channel.name} sent {type(other).__name__}")
