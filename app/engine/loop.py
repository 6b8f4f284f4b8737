"""The step loop: apply, plan, submit, then deliver.

Everything here runs on the event loop, in callbacks that end within a fraction of a millisecond.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from app.engine.backlog import ENDS, FEWEST_ENDS, Backlog
from app.engine.commands import Commands
from app.engine.metrics import Recorder
from app.engine.output import Stream
from app.logs import log_stacks
from core.clock import Clock
from core.command import CommandDone
from core.errors import Unavailable
from core.executor import Capabilities, Executor
from core.plan import StepFailure
from core.request import Request
from core.schedule.adapters import Places
from core.schedule.scheduler import Confirmed, Scheduler
from core.stats import EngineStatistics, SchedulerStatistics, Workload
from core.types import Finish, FinishReason, Ints, RootKey

log = logging.getLogger(__name__)

BACKLOG = 32
"""Planning pauses when a delivery has waited for so many steps: a device faster than the loop would fill the
memory. With 4, two H100s stood still for 5% of `short512` (`history/h100x2-backlog-qwen3-8b.json`)."""

PAUSED_TICK = 0.25
"""Seconds between two ticks while requests wait for a paused engine: their time may run out."""


class Engine:
    """Runs the scheduler against an executor and hands tokens to streams.

    After every burst of results the order is fixed: apply them, plan and submit until
    `depth` + 1 steps are in flight, and only then deliver, in slices, so that writing to clients
    never delays the device.

    Its callbacks have a boundary: an exception there fails the engine as a whole, since any
    request may have lost a token. Every stream gets an error then, and nothing runs any more.

    Owner: event loop.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, depth: int, clock: Clock) -> None:
        self._scheduler = scheduler
        self.recorder = Recorder(clock, executor.capabilities)
        self.failure: str | None = None
        self.hung = False
        """Whether the failure is a device that does not answer: its threads never end."""
        self.on_failure: Callable[[str], None] = lambda reason: None
        self.on_add: Callable[[list[Request]], None] = lambda requests: None
        """Called before requests are queued, so that background runs can be preempted for them."""
        self.on_place: Callable[[str, int], None] = lambda adapter, place: None
        """Called to copy an adapter to a place. Answered with `places.placed` and `wake`, or with `lose`."""
        self.paused = False
        """No step is planned while it is set; `resume` ends it."""
        self._gap = 0.0
        self._resting: asyncio.TimerHandle | None = None
        self.commands = Commands(executor)
        self._executor = executor
        self._depth = min(depth, executor.capabilities.max_depth)
        self._backlog = Backlog(self.recorder, self._stopped)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tick_due = False
        self._deliver_due = False

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take requests from now on. Call once, on the loop."""
        self._loop = loop

        def wake() -> None:
            loop.call_soon_threadsafe(self._tick)

        self._executor.start(wake)

    def close(self) -> None:
        """Stop the executor. Requests and commands that still run end with an error."""
        if not self.hung:
            self._executor.close()
        self._loop = None
        self._end_all("The server is shutting down.")

    # -- requests ----------------------------------------------------------------------------------

    def add(self, requests: list[Request], streams: list[Stream]) -> None:
        """Queue all of them, or raise and queue none. Raises `Unavailable` after a failure."""
        if self.failure is not None:
            raise Unavailable(f"The engine has failed: {self.failure}")
        self.on_add(requests)
        self._scheduler.add(requests)
        for request, stream in zip(requests, streams, strict=True):
            self._backlog.open(request, stream)
        self.wake()

    def abort(self, request: Request, finish: Finish) -> None:
        """End a request in any state; its last piece follows."""
        if self.failure is None:  # else it has had its last piece
            self._scheduler.abort(request, finish)
            self.wake()

    def abort_all(self, finish: Finish) -> None:
        """End every request that is here."""
        for request in self._scheduler.requests():
            self.abort(request, finish)

    def lose(self, adapter: str, reason: str) -> None:
        """End the requests of an adapter that cannot be run."""
        for request in self._scheduler.requests():
            if request.root.adapter == adapter:
                self.abort(request, Finish(FinishReason.ERROR, message=reason))
        self.places.forget(adapter)
        self.wake()

    def retract_all(self) -> None:
        """Send every running request back to the queue."""
        self._scheduler.retract_all()

    def flush(self) -> None:
        """Drop all KV that is cached and that no running request holds."""
        self._scheduler.cache.flush()

    def cached(self, root: RootKey, prompt: Ints) -> int:
        """Tokens of a prompt that are cached. Nothing is locked or refreshed."""
        return self._scheduler.cache.peek(root, prompt, len(prompt)).tokens

    async def quiet(self) -> None:
        """Wait until no step is in flight. Raises `EngineFailed`."""
        await self.commands.quiet(self._scheduler.in_flight)

    def resume(self) -> None:
        """Plan steps again."""
        self.paused = False
        self._rested()

    def set_stream_interval(self, steps: int) -> None:
        """Send the tokens of so many steps as one event, from the next step on."""
        self._backlog.interval = self.recorder.stream_interval = steps

    def share_loop(self, engines: int) -> None:
        """Deliver as one of so many engines on this loop."""
        self._backlog.ends = max(ENDS // engines, FEWEST_ENDS)

    def slow_down(self, gap: float) -> None:
        """Leave `gap` seconds between a plan and the next; 0: none."""
        self._gap = gap
        self._rested()

    def _rest(self, seconds: float) -> None:
        assert self._loop is not None
        self._resting = self._loop.call_later(seconds, self._rested)

    def _rested(self) -> None:
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None
        self.wake()

    # -- the step ----------------------------------------------------------------------------------

    def wake(self) -> None:
        """Plan once this turn of the loop is over, so that requests of one burst go together."""
        if not self._tick_due and self._loop is not None:
            self._tick_due = True
            self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        self._tick_due = False
        self._bounded(self._step)

    def _deliver(self) -> None:
        self._deliver_due = False
        self._bounded(self._deliver_turn)

    def _bounded(self, act: Callable[[], None]) -> None:
        """Run a callback; an exception in it fails the engine."""
        if self.failure is not None or self._loop is None:
            return
        try:
            act()
        except Exception as error:
            log.exception("the step loop raised")
            self._backlog.clear()  # its tokens may have a hole, or be of a step whose ends were not found
            self.fail(f"{type(error).__name__}: {error}")

    def _step(self) -> None:
        """Apply what has arrived, plan what follows."""
        for result in self._executor.results():
            if isinstance(result, CommandDone):
                self.commands.settle(result)
                continue
            if isinstance(result, StepFailure):
                self.fail(result.reason)
                return
            confirmed = self._scheduler.apply(result)
            self.recorder.step(confirmed, result.seconds)
            if self.recorder.drafts is not None and result.drafted is not None:
                self.recorder.drafts.add(result.drafted, result.counts)
            self._backlog.add(confirmed)
        self._submit()
        if not self._scheduler.in_flight:
            self._backlog.flush()
            self.commands.is_quiet()
        self._deliver_soon()

    def _submit(self) -> None:
        while self._may_plan():
            plan = self._scheduler.plan()
            if plan is None:
                break
            self._executor.submit(plan)
            if self._gap:
                self._rest(self._gap)
        for adapter, place in self.places.take_due():
            self.on_place(adapter, place)
        if self.paused:
            self._scheduler.expire()
            if self._resting is None and not self._scheduler.idle:
                self._rest(PAUSED_TICK)
        if ended := self._scheduler.take_finished():
            self._backlog.add(Confirmed([], [], {}, {}, ended))
            self.wake()  # planning may have paused for a row of theirs

    def _may_plan(self) -> bool:
        return (
            not self.paused
            and self._resting is None
            and self._scheduler.may_plan(self._depth)
            and self._backlog.behind < BACKLOG
        )

    # -- delivery ----------------------------------------------------------------------------------

    def _deliver_soon(self) -> None:
        if self._backlog.waiting and not self._deliver_due and self._loop is not None:
            self._deliver_due = True
            self._loop.call_soon(self._deliver)

    def _deliver_turn(self) -> None:
        behind = self._backlog.behind
        self._backlog.deliver_turn()
        if self._backlog.behind < BACKLOG <= behind:
            self.wake()  # planning has paused
        self._deliver_soon()

    def _stopped(self, request: Request, finish: Finish) -> None:
        """Finish a request that its stream has ended."""
        if self.failure is None:
            self._scheduler.finish(request, finish)
            self.wake()

    # -- failure -----------------------------------------------------------------------------------

    def hang(self, reason: str) -> None:
        """Fail because the device does not answer any more: see `app.engine.watchdog`."""
        self.hung = True
        self.fail(reason)

    def fail(self, reason: str) -> None:
        """Report a failure and end. Nothing happens after the first one."""
        if self.failure is None:
            log_stacks()
            self.on_failure(reason)
            self.end(reason)

    def end(self, reason: str) -> None:
        """End everything with `reason`, for good."""
        if self.failure is None:
            self.failure = reason
            self._end_all(reason)

    def _end_all(self, reason: str) -> None:
        """Every promised stream gets its last piece, and every command its answer, with the reason."""
        self.commands.fail(reason)
        self._backlog.end_all(Finish(FinishReason.ERROR, message=reason))

    # -- state -------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        """The executor's capabilities."""
        return self._executor.capabilities

    @property
    def places(self) -> Places:
        """The places of adapters on the device."""
        return self._scheduler.places

    @property
    def idle(self) -> bool:
        """Whether nothing runs, waits or is still to be delivered."""
        return self._scheduler.idle and self._backlog.empty

    @property
    def awaits_step(self) -> bool:
        """Whether the device has a step to finish, and no command before it that may take long."""
        return self._scheduler.in_flight > 0 and not self.commands.blocking

    def check_integrity(self) -> None:
        """Raise unless pages, slots and rows agree. Slow; any thread may call it while the engine is idle."""
        self._scheduler.check_integrity()

    def workload(self) -> Workload:
        """See `Scheduler.workload`."""
        return self._scheduler.workload()

    def load(self) -> SchedulerStatistics:
        """Counts of what runs, waits and is cached now."""
        return self._scheduler.statistics()

    def statistics(self) -> EngineStatistics:
        return self.recorder.statistics(self.load())
