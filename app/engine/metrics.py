"""Latencies as histograms: time to first token, inter-token, end to end, queue."""

from __future__ import annotations

from core.clock import Clock
from core.request import Request
from core.stats import DraftStatistics, EngineStatistics, Histogram, SchedulerStatistics

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Bounds of the histograms, from one fast decode step to the slowest answers."""


def _times() -> Histogram:
    return Histogram(SECONDS, [0] * (len(SECONDS) + 1))


class Recorder:
    """Collects what `/metrics` shows.

    Owner: event loop. `lag` is set by `Housekeeping`.
    """

    def __init__(self, clock: Clock, max_drafts: int = 0) -> None:
        """`max_drafts` of a row; 0: no speculative decoding."""
        self._clock = clock
        self.drafts = DraftStatistics([0] * max_drafts) if max_drafts else None
        self._ttft = _times()
        self._inter_token = _times()
        self._end_to_end = _times()
        self._queue = _times()
        self._last_step = 0.0
        self._previous = 0.0
        """The step that the next one's tokens have waited since; 0: none, after a rest."""
        self._seconds = 0.0
        self._spent = 0.0
        self.lag = 0.0
        self.steps = 0
        self.rows = 0
        """Sums over all steps: two readings of both give the mean rows of a step between them."""

    def step(self, rows: int, seconds: float) -> None:
        """One step was applied that brought tokens to `rows` requests: each waited since the step before."""
        self.steps += 1
        self.rows += rows
        now = self._clock()
        if self._previous and rows:
            self._inter_token.add(now - self._previous, rows)
        self._last_step = self._previous = now
        self._seconds = seconds
        self._spent += seconds

    def idle(self) -> None:
        """Nothing runs: the time until the next step is no inter-token latency."""
        self._previous = 0.0

    def first_token(self, request: Request) -> None:
        request.first_token_at = self._clock()
        self._ttft.add(request.first_token_at - request.arrival)
        self._queue.add(request.started_at - request.arrival)

    def ended(self, request: Request) -> None:
        self._end_to_end.add(self._clock() - request.arrival)

    def statistics(self, scheduler: SchedulerStatistics) -> EngineStatistics:
        return EngineStatistics(
            scheduler=scheduler,
            last_step_at=self._last_step,
            step_seconds=self._seconds,
            device_seconds=self._spent,
            loop_lag=self.lag,
            ttft=self._ttft,
            inter_token=self._inter_token,
            end_to_end=self._end_to_end,
            queue=self._queue,
            drafts=self.drafts,
        )
