"""`core.executor.Executor` over the devices of this process, and over other nodes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from typing import Protocol

import msgspec
import numpy as np

from core.command import Command, CommandDone
from core.costs import MeasuredCosts
from core.errors import EngineFailed
from core.executor import Capabilities
from core.mailbox import Outbox
from core.plan import StepFailure, StepPlan, StepResult
from core.types import NAN_TOKEN
from gpu.ranks import RankGroup
from gpu.worker import Item, Progress, Runner, Worker

COMPARED = 1000
"""Steps between two of which the tokens of all ranks are compared: they follow from equal logits."""


def compared(step: int) -> bool:
    """Whether the tokens of this step are."""
    return (step + 1) % COMPARED == 0


class PlanWorker(Protocol):
    """Runs plans: a rank of this process (`gpu.worker.Worker`), or all ranks of another node. It posts what
    it has ended in order, and a `StepFailure` when it is lost."""

    @property
    def prepared(self) -> Future[MeasuredCosts | None]:
        """Done when steps can be launched; fails with `EngineFailed`."""
        ...

    def start(self, progress: Progress | None = None) -> None:
        """Begin; does nothing where it has."""
        ...

    def submit(self, plan: StepPlan | Command) -> None:
        """Queue; never blocks."""
        ...

    def close(self) -> bool:
        """Finish what was submitted, then end. Returns whether it has ended."""
        ...


MakeWorker = Callable[[Callable[[Item], None], threading.Event], PlanWorker]
"""Makes a worker of what takes its items, and of the event that says that one has failed."""


class LocalExecutor:
    """A worker for each rank of this process, and a worker for each other node: all of them get every plan
    and command.

    A step is answered by rank 0, when every rank has ended it; a failure of any rank is the executor's, and
    ends what others wait for.

    Owner: event loop. See `core.executor.Executor` for what each method promises.
    """

    def __init__(
        self,
        ranks: Sequence[Runner],
        capabilities: Capabilities,
        group: RankGroup | None = None,
        nodes: Sequence[MakeWorker] = (),
    ) -> None:
        """`group` is how the ranks meet; None: they do not. `nodes` are the others, on node 0."""
        self._capabilities, self._group = capabilities, group
        self._outbox: Outbox[Item] = Outbox()
        self._failed = threading.Event()
        self._lock = threading.Lock()
        self._over = False
        self._arrived: dict[tuple[bool, int], dict[int, StepResult | CommandDone]] = {}
        """What some ranks have ended and others have not, by rank: steps (False) and commands by number."""
        self._reads: set[int] = set()
        """Commands that leave ranks equal where some alone refuse: no step sees an adapter that was only
        read, and whoever asked for it has it dropped."""
        self._workers: list[PlanWorker] = [
            Worker(runner, partial(self._post, rank), self._failed, rank) for rank, runner in enumerate(ranks)
        ]
        for number, make in enumerate(nodes, len(ranks)):
            self._workers.append(make(partial(self._post, number), self._failed))

    @property
    def capabilities(self) -> Capabilities:
        """What the ranks were built to hold."""
        return self._capabilities

    def prepare(self, progress: Progress) -> None:
        """Start the threads and wait until every rank can launch steps: a GPU captures graphs. Call before
        `start`, from any thread. Raises `EngineFailed` for a rank that cannot; the executor is closed then.
        """
        for worker in self._workers:
            worker.start(progress)
        try:
            ranks = [worker.prepared for worker in self._workers]
            wait(ranks, return_when=FIRST_EXCEPTION)
            costs = [prepared.result() for prepared in ranks if prepared.done()]
            found = costs[0] or MeasuredCosts()
            self._capabilities = msgspec.structs.replace(
                self._capabilities, costs=found.drafts, chunk_costs=found.chunks
            )
        except EngineFailed:
            self.close()
            raise

    def start(self, wake: Callable[[], None]) -> None:
        """Take plans; `wake` is called from a waiter thread. Does not wait for ranks that still prepare."""
        self._outbox.listen(wake)
        for worker in self._workers:
            worker.start()

    def submit(self, plan: StepPlan) -> None:
        """Queue a plan. Raises `core.mailbox.Closed` after `close`."""
        for worker in self._workers:
            worker.submit(plan)

    def command(self, command: Command) -> None:
        """Queue a command behind the plans submitted so far. The executor fails where only some ranks carry
        it out: they would no longer be equal."""
        if command.action == "adapter_read":
            with self._lock:
                self._reads.add(command.id)
        for worker in self._workers:
            worker.submit(command)

    def results(self) -> list[Item]:
        """What has arrived since the last call."""
        return self._outbox.drain()

    def close(self) -> None:
        """Finish, then join."""
        for worker in self._workers:
            if not worker.close() and self._group is not None:
                self._group.abort("a rank does not end")

    def _post(self, rank: int, item: Item) -> None:
        """A thread of `rank`: take what it has ended, and hand out what all have."""
        with self._lock:
            if self._over:
                return
            if isinstance(item, StepFailure):
                answer: Item = item
            else:
                key = (True, item.id) if isinstance(item, CommandDone) else (False, item.step)
                arrived = self._arrived.setdefault(key, {})
                arrived[rank] = item
                if len(arrived) < len(self._workers):
                    return
                answer = self._agreed([each for _, each in sorted(self._arrived.pop(key).items())])
            if isinstance(answer, StepFailure):
                self._over = True
                if self._group is not None:
                    self._group.abort(answer.reason)
            self._outbox.put(answer)

    def _agreed(self, items: Sequence[Item]) -> Item:
        """One answer for all ranks, from their `items` for the same plan or command."""
        errors = [item.error for item in items if isinstance(item, CommandDone) and item.error is not None]
        first = items[0]
        if isinstance(first, CommandDone) and first.id in self._reads:
            self._reads.remove(first.id)
            alone = " Others could: it must lie on every node." * (0 < len(errors) < len(items))
            return CommandDone(first.id, errors[0] + alone if errors else None)
        if errors and len(errors) < len(items):
            self._failed.set()
            return StepFailure(-1, f"a command was carried out by some ranks alone: {errors[0]}")
        if len(items) > 1 and isinstance(first, StepResult) and compared(first.step):
            tokens = [item.tokens.copy() for item in items if isinstance(item, StepResult)]
            for own in tokens:
                own[list(first.failed)] = NAN_TOKEN  # rank 0 alone has matchers
            for rank, own in enumerate(tokens):
                if not np.array_equal(own, tokens[0]):
                    self._failed.set()
                    return StepFailure(first.step, f"rank 0 sampled {tokens[0]}, rank {rank} {own}")
        return first
