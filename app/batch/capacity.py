"""Engine capacity for batch lines: admitted while the engine is idle, preempted by clients' requests."""

from __future__ import annotations

from typing import cast

import msgspec

from app.engine.job import Generator, Job, Run, Sink
from app.engine.loop import Engine
from app.engine.replicas import Replicas
from app.engine.submit import Submitter
from app.service import Loaded
from core.request import Request, State

BACKGROUND = -(2**31) - 1
"""Priority of a batch's requests: below any that a client can set."""

KEPT_ROWS = 8
"""One row in this many stays free, so that a new interactive request finds a slot."""
KEPT_PAGES = 4
"""Lines start only while more than one page in this many is free or evictable."""
STARTING = 8
"""Lines that may be rendered and encoded at once: their length is not known yet."""
MAX_PASSED_OVER = 2
"""Plans that may skip a waiting request before all background runs are preempted."""


class BackgroundRun:
    """One attempt at one batch line: its runs, and whether they were preempted.

    Passed as the engine to the code that makes the answer, which only starts jobs on it.
    Owner: event loop.
    """

    def __init__(self, engine: Generator, replica: int) -> None:
        self._engine = engine
        self.replica = replica
        """The replica where it runs."""
        self.runs: list[Run] = []
        self.preempted = False
        """Aborted for clients' requests: the answer is discarded and the line runs again."""

    async def start(self, job: Job, sink: Sink) -> Run:
        """See `app.engine.job.Generator.start`."""
        job = msgspec.structs.replace(job, priority=BACKGROUND, replica=self.replica)
        run = await self._engine.start(job, sink)
        self.runs.append(run)
        if self.preempted:
            run.abort()
        return run

    def preempt(self) -> None:
        """Abort its runs, so that the next plan can use their slots and pages."""
        self.preempted = True
        for run in self.runs:
            run.abort()

    def count(self, *states: State) -> int:
        """Choices in one of the states."""
        return sum(run.count(*states) for run in self.runs)

    def prompts(self, *states: State) -> list[int]:
        """Tokens of the prompt of each choice in one of the states."""
        return [len(run.prompt) for run in self.runs for _ in range(run.count(*states))]


class BackgroundCapacity:
    """Admits batch lines on any replica that has capacity for one, the least loaded first.

    Owner: event loop.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = [ReplicaCapacity(engine) for engine in replicas.engines]

    def admit(self, loaded: Loaded) -> tuple[BackgroundRun, Loaded] | None:
        """A run for one line, and the model with the run as its engine; None without capacity."""
        for replica, capacity in sorted(enumerate(self._replicas), key=lambda each: each[1].load):
            if capacity.idle:
                run = BackgroundRun(loaded.engine, replica)
                capacity.add(run)
                return run, msgspec.structs.replace(loaded, engine=cast(Submitter, run))
        return None

    def release(self, run: BackgroundRun) -> None:
        """End a run. Idempotent."""
        self._replicas[run.replica].release(run)

    def preempt_all(self) -> None:
        """Preempt every line."""
        for capacity in self._replicas:
            capacity.preempt_all()

    def check_starvation(self) -> None:
        """Preempt the lines of a replica that keeps skipping a client's request. Called every few
        milliseconds."""
        for capacity in self._replicas:
            capacity.check_starvation()


class ReplicaCapacity:
    """Admits batch lines while no client's request waits, and preempts them when one would have to wait.

    Three rules let a client's request be admitted by the next plan, as if no batch ran. It never queues
    behind a batch line: waiting lines are preempted. It finds a slot: one row in `KEPT_ROWS` stays free, and
    more are freed for a request with several choices. It finds room in the step: batch prompts in prefill
    take at most half of a step, and longer ones are preempted. That leaves memory: when plans keep skipping
    a waiting request, all batch lines are preempted. A preempted line runs again later; the KV of its prompt
    is often still in the radix tree.

    Owner: event loop.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._rows = engine.capabilities.max_rows
        self._prompt_share = engine.capabilities.max_step_tokens // 2
        self._runs: dict[BackgroundRun, None] = {}
        self._since: int | None = None
        """Step count when a client's request was first seen waiting."""
        engine.on_add = self.preempt_for

    @property
    def load(self) -> int:
        """Requests, and lines that are not queued yet."""
        statistics = self._engine.load()
        return statistics.running + statistics.waiting + self._starting()

    def add(self, run: BackgroundRun) -> None:
        """Count a run until `release`."""
        self._runs[run] = None

    def release(self, run: BackgroundRun) -> None:
        """End a run. Idempotent."""
        self._runs.pop(run, None)

    def preempt_all(self) -> None:
        """Preempt every line."""
        for run in self._runs:
            run.preempt()

    def preempt_for(self, requests: list[Request]) -> None:
        """Free a slot and room in the step for `requests`, which are queued next."""
        if not self._runs or requests[0].priority == BACKGROUND:
            return
        for run in self._runs:
            if run.count(State.WAITING) or max(run.prompts(State.PREFILL), default=0) > self._prompt_share:
                run.preempt()
        statistics = self._engine.load()
        short = statistics.waiting + len(requests) - (self._rows - statistics.running)
        for run in reversed(self._runs):  # the newest has computed the least
            if short <= 0:
                return
            if not run.preempted:
                short -= run.count(State.PREFILL, State.DECODE)
                run.preempt()

    def check_starvation(self) -> None:
        """Preempt every run when plans keep skipping a client's request. Called every few milliseconds."""
        statistics = self._engine.load()
        if not self._runs or statistics.waiting <= self._own_waiting():
            self._since = None
        elif self._since is None:
            self._since = statistics.steps
        elif statistics.steps - self._since >= MAX_PASSED_OVER:
            self.preempt_all()

    def _starting(self) -> int:
        return sum(not run.runs for run in self._runs)

    def _own_waiting(self) -> int:
        return sum(run.count(State.WAITING) for run in self._runs)

    @property
    def idle(self) -> bool:
        """There is capacity for another line."""
        statistics, own = self._engine.load(), self._own_waiting()
        starting = self._starting()
        prompts = [n for run in self._runs for n in run.prompts(State.WAITING, State.PREFILL)]
        cache = statistics.cache
        return (
            statistics.waiting <= own
            and starting < STARTING
            and statistics.running + own + starting < self._rows - max(self._rows // KEPT_ROWS, 1)
            and sum(prompts) < self._prompt_share
            and (cache.free + cache.cached) * KEPT_PAGES > cache.total
        )
