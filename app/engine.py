"""The step loop: apply, plan, submit, then deliver.

Everything here runs on the event loop, in callbacks that end within a fraction of a millisecond.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from app.deliver import Stream
from app.orders import Orders
from app.recorder import Recorder
from core.clock import Clock
from core.executor import Executor
from core.order import OrderDone
from core.plan import StepFailure
from core.request import Request
from core.schedule.scheduler import Confirmed, Scheduler
from core.stats import EngineStatistics
from core.types import Finish, FinishReason

BACKLOG = 4
"""Results that may wait for delivery before planning pauses. Only a device that is faster than the
loop gets there; without a bound its tokens would pile up in memory."""

SLICE = 32
"""Rows delivered in one callback: 32 rows of at most 10 µs stay under the loop's 0.3 ms."""


class Engine:
    """Runs the scheduler against an executor and hands tokens to streams.

    After every burst of results the order is fixed: apply them, plan and submit until
    `depth` + 1 steps are in flight, and only then deliver, in slices, so that writing to clients
    never delays the device.

    Owner: event loop.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, depth: int, clock: Clock) -> None:
        self.scheduler = scheduler
        self.recorder = Recorder(clock)
        self.failure: str | None = None
        self.on_failure: Callable[[str], None] = lambda reason: None
        self.on_add: Callable[[list[Request]], None] = lambda requests: None
        """Called before requests are queued: who runs in the background can make room."""
        self.paused = False
        """No step is planned while it is set; `resume` ends it."""
        self._gap = 0.0
        self._resting: asyncio.TimerHandle | None = None
        self.orders = Orders(executor)
        self._executor = executor
        self._depth = min(depth, executor.capabilities.max_depth)
        self._streams: dict[Request, Stream] = {}
        self._backlog: deque[tuple[Confirmed, int]] = deque()
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
        """Stop the executor. Requests that still run end with an error."""
        self._executor.close()
        self._end_all("The server is shutting down.")

    # -- requests ----------------------------------------------------------------------------------

    def add(self, requests: list[Request], streams: list[Stream]) -> None:
        """Queue all of them, or raise and queue none."""
        self.on_add(requests)
        self.scheduler.add(requests)
        for request, stream in zip(requests, streams, strict=True):
            self._streams[request] = stream
        self._wake()

    def abort(self, request: Request, finish: Finish) -> None:
        """End a request in any state; its last piece follows."""
        self.scheduler.abort(request, finish)
        self._wake()

    def abort_all(self, finish: Finish) -> None:
        """End every request that is here."""
        for request in self.scheduler.requests():
            self.scheduler.abort(request, finish)
        self._wake()

    def resume(self) -> None:
        """Plan again."""
        self.paused = False
        self._wake()

    def slow_down(self, gap: float) -> None:
        """Leave `gap` seconds between a plan and the next; 0: none."""
        self._gap = gap
        if self._resting is not None:
            self._resting.cancel()
            self._rested()

    def _rest(self) -> None:
        assert self._loop is not None
        self._resting = self._loop.call_later(self._gap, self._rested)

    def _rested(self) -> None:
        self._resting = None
        self._wake()

    # -- the step ----------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Plan once this turn of the loop is over, so that requests of one burst go together."""
        if not self._tick_due and self._loop is not None:
            self._tick_due = True
            self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        self._tick_due = False
        for result in self._executor.results():
            if isinstance(result, OrderDone):
                self.orders.settle(result)
                continue
            if isinstance(result, StepFailure):
                self._fail(result.reason)
                return
            confirmed = self.scheduler.apply(result)
            self.recorder.step(len(confirmed.tokens), result.seconds)
            self._backlog.append((confirmed, 0))
        self._submit()
        if not self.scheduler.in_flight:
            self.orders.is_quiet()
        self._deliver_soon()

    def _submit(self) -> None:
        while self._may_plan():
            plan = self.scheduler.plan()
            if plan is None:
                break
            self._executor.submit(plan)
            if self._gap:
                self._rest()
        ended = self.scheduler.take_finished()
        if ended:
            self._backlog.append((Confirmed([], [], {}, {}, [], ended), 0))

    def _may_plan(self) -> bool:
        return (
            not self.paused
            and self._resting is None
            and self.failure is None
            and self.scheduler.in_flight <= self._depth
            and len(self._backlog) < BACKLOG
        )

    def _deliver_soon(self) -> None:
        if self._backlog and not self._deliver_due:
            assert self._loop is not None
            self._deliver_due = True
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._deliver_due = False
        if not self._backlog:
            return
        confirmed, start = self._backlog.popleft()
        if start == 0:
            self._give(confirmed)
        stop = min(start + SLICE, len(confirmed.requests))
        self._deliver_rows(confirmed, start, stop)
        if stop < len(confirmed.requests):
            self._backlog.appendleft((confirmed, stop))
        else:
            for request in confirmed.finished:
                self._end(request)
            if not self._backlog and not self.scheduler.in_flight:
                self._wake()  # planning may have paused
        self._deliver_soon()

    def _give(self, confirmed: Confirmed) -> None:
        """What steps know besides tokens, to whoever is still there."""
        for request, logprobs in confirmed.prompt_logprobs:
            if (stream := self._streams.get(request)) is not None:
                stream.prompt_logprobs.append(logprobs)
        for request, states in confirmed.hidden:
            if (stream := self._streams.get(request)) is not None:
                stream.hidden.append(states)
        for request, chosen in confirmed.experts:
            if (stream := self._streams.get(request)) is not None:
                stream.experts.append(chosen)

    def _deliver_rows(self, confirmed: Confirmed, start: int, stop: int) -> None:
        requests, tokens, ends, logprobs = confirmed[:4]
        streams = self._streams
        for row in range(start, stop):
            request = requests[row]
            stream = streams.get(request)
            if stream is None or stream.done:
                continue  # ended by a stop string after this token was already on its way
            if stream.count == 0:
                self.recorder.first_token(request)
            if row in ends:
                # A row without finite logits has no token of its own.
                last = tokens[row] if tokens[row] >= 0 else None
                stream.end(ends[row], last, logprobs.get(row))
                self._close(request, stream)
            elif (finish := stream.feed(tokens[row], logprobs.get(row))) is not None:
                self.scheduler.finish(request, finish)
                self._close(request, stream)
                self._wake()

    def _end(self, request: Request) -> None:
        stream = self._streams.get(request)
        if stream is not None and not stream.done:
            assert request.finish is not None
            stream.end(request.finish)
            self._close(request, stream)

    def _close(self, request: Request, stream: Stream) -> None:
        del self._streams[request]
        # Tokens past a stop string were computed but belong to nobody's answer.
        del request.output[stream.count :]
        self.recorder.ended(request)

    # -- failure -----------------------------------------------------------------------------------

    def _fail(self, reason: str) -> None:
        self.failure = reason
        self._end_all(reason)
        self.on_failure(reason)

    def _end_all(self, reason: str) -> None:
        """Every promised stream gets its last piece, with the reason."""
        while self._backlog:
            self._deliver()
        for request, stream in list(self._streams.items()):
            del self._streams[request]
            stream.end(Finish(FinishReason.ERROR, message=reason))

    # -- state -------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Nothing runs, waits or is still to be delivered."""
        return self.scheduler.idle and not self._backlog

    def statistics(self) -> EngineStatistics:
        return self.recorder.statistics(self.scheduler.statistics())
