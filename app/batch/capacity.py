"""Engine capacity for batch lines: admits them when the engine is idle, aborts them for clients' requests."""

from __future__ import annotations

from typing import cast

import msgspec

from app.engine.job import Job, Run, Sink
from app.engine.loop import Engine
from app.service import Control, Loaded
from core.executor import Capabilities
from core.request import Request, State

BACKGROUND = -(2**31) - 1
"""Priority of a batch's requests: below the lowest that a client can ask for."""

KEPT_ROWS = 8
"""One row in so many stays free, so that a request that comes alone finds a slot."""
KEPT_PAGES = 4
"""One page in so many stays free or evictable before another line starts."""
STARTING = 8
"""Lines that may be on their way to the queue (rendered, encoded): their length is not known yet."""
MAX_PASSED_OVER = 2
"""Plans that may pass over a waiting request before every background run is aborted."""


class BackgroundRun:
    """One attempt at one batch line: its runs, and whether they were aborted to make way.

    Stands for the engine where an answer is made, which only ever starts jobs on it.
    Owner: event loop.
    """

    __slots__ = ("_engine", "aside", "runs")

    def __init__(self, engine: Control) -> None:
        self._engine = engine
        self.runs: list[Run] = []
        self.aside = False
        """Aborted to make way: its answer is discarded."""

    async def start(self, job: Job, sink: Sink) -> Run:
        """See `app.engine.job.Generator.start`."""
        run = await self._engine.start(msgspec.structs.replace(job, priority=BACKGROUND), sink)
        self.runs.append(run)
        if self.aside:
            run.abort()
        return run

    def give_way(self) -> None:
        """Free what it holds for the next plan."""
        self.aside = True
        for run in self.runs:
            run.abort()

    def count(self, *states: State) -> int:
        """Choices in one of the states."""
        return sum(run.count(*states) for run in self.runs)

    def prompts(self, *states: State) -> list[int]:
        """Tokens of the prompt of each choice in one of the states."""
        return [len(run.prompt) for run in self.runs for _ in range(run.count(*states))]


class BackgroundCapacity:
    """Admits batch lines while no client's request waits, and aborts them when one would have to.

    Three rules hold for a request that is not from a batch. It is never behind one in the queue:
    those that wait there leave it first. It finds a slot: one row in `KEPT_ROWS` stays free, and more
    are freed when it brings more choices. It finds room in the step: prompts of the background that
    are being computed take half of a step at most, and a longer one makes way. So it is admitted by
    the next plan, as if no batch ran. What is left is memory: a request that plans pass over although
    there is a slot gets everything that the background holds. A line that made way starts again later;
    its prompt's KV is often still in the tree.

    Owner: event loop.
    """

    __slots__ = ("_engine", "_prompt_share", "_rows", "_runs", "_since")

    def __init__(self, engine: Engine, capabilities: Capabilities) -> None:
        self._engine = engine
        self._rows = capabilities.max_rows
        self._prompt_share = capabilities.max_step_tokens // 2
        self._runs: dict[BackgroundRun, None] = {}
        self._since: int | None = None
        """Steps made when somebody else was first seen waiting."""
        engine.on_add = self.make_way

    def enter(self, loaded: Loaded) -> tuple[BackgroundRun, Loaded] | None:
        """A run for one line, and the model with it as engine; None when there is no capacity now."""
        if not self._idle():
            return None
        run = BackgroundRun(loaded.engine)
        self._runs[run] = None
        return run, msgspec.structs.replace(loaded, engine=cast(Control, run))

    def leave(self, run: BackgroundRun) -> None:
        """The line has ended. Idempotent."""
        self._runs.pop(run, None)

    def clear(self) -> None:
        """Every line makes way, at once."""
        for run in self._runs:
            run.give_way()

    def make_way(self, requests: list[Request]) -> None:
        """Called before `requests` are queued: see the class."""
        if not self._runs or requests[0].priority == BACKGROUND:
            return
        for run in self._runs:
            if run.count(State.WAITING) or max(run.prompts(State.PREFILL), default=0) > self._prompt_share:
                run.give_way()
        statistics = self._engine.load()
        short = statistics.waiting + len(requests) - (self._rows - statistics.running)
        for run in reversed(self._runs):  # the newest has the least to lose
            if short <= 0:
                return
            if not run.aside:
                short -= run.count(State.PREFILL, State.DECODE)
                run.give_way()

    def press(self) -> None:
        """Called every few milliseconds: aborts every run when plans keep passing over a request."""
        statistics = self._engine.load()
        if not self._runs or statistics.waiting <= self._own_waiting():
            self._since = None
        elif self._since is None:
            self._since = statistics.steps
        elif statistics.steps - self._since >= MAX_PASSED_OVER:
            self.clear()

    def _own_waiting(self) -> int:
        return sum(run.count(State.WAITING) for run in self._runs)

    def _idle(self) -> bool:
        statistics, own = self._engine.load(), self._own_waiting()
        starting = sum(not run.runs for run in self._runs)
        prompts = [n for run in self._runs for n in run.prompts(State.WAITING, State.PREFILL)]
        cache = statistics.cache
        return (
            statistics.waiting <= own
            and starting < STARTING
            and statistics.running + own + starting < self._rows - max(self._rows // KEPT_ROWS, 1)
            and sum(prompts) < self._prompt_share
            and (cache.free + cache.cached) * KEPT_PAGES > cache.total
        )
