"""A scheduler before a simulated device: what callers wait for, in simulated seconds."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

import msgspec
import numpy as np

from core.cache.manager import CacheManager
from core.config import ScheduleConfig
from core.errors import Overloaded
from core.executor import Capabilities
from core.plan import StepPlan, StepResult
from core.request import Request, SamplingParams
from core.schedule.scheduler import Scheduler
from tests.rigs.scheduler import Clock

STEP, TOKEN = 3e-3, 34e-6
"""Seconds of a step, and of each of its tokens: an 8B on one GPU, about."""


class _Flight(NamedTuple):
    plan: StepPlan
    ends: float
    seconds: float


class Simulation:
    """Time goes from event to event: a step of the device ends, or somebody acts."""

    def __init__(self, *, rows: int = 64, pages: int = 20_000, **schedule: Any) -> None:
        self.clock = Clock()
        config = msgspec.convert({"step_tokens": 8192, **schedule}, ScheduleConfig)
        capabilities = Capabilities(
            num_pages=pages + 1,
            page_size=16,
            max_rows=rows,
            context_length=32_768,
            vocab_size=1000,
            max_step_tokens=config.step_tokens,
            device="simulated",
        )
        self.scheduler = Scheduler(capabilities, CacheManager(pages + 1, 16), config, self.clock)
        self.on_end: dict[Request, Callable[[], None]] = {}
        """Called when the request has ended."""
        self._flights: deque[_Flight] = deque()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._rng = np.random.default_rng(0)

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Call `act` when `seconds` seconds have passed."""
        heapq.heappush(self._events, (self.clock.now + seconds, next(self._numbers), act))

    def request(self, caller: str, tokens: int, output: int = 1, **options: Any) -> Request:
        """A request with a prompt of `tokens` random tokens, not queued yet."""
        prompt = self._rng.integers(0, 1000, tokens, np.int32)
        request = Request(f"r{next(self._numbers)}", prompt, SamplingParams(max_tokens=output), **options)
        request.arrival, request.caller = self.clock.now, caller
        return request

    def run(self, seconds: float) -> None:
        """Let `seconds` seconds pass."""
        end = self.clock.now + seconds
        while True:
            self._submit()
            step = self._flights[0].ends if self._flights else float("inf")
            event = self._events[0][0] if self._events else float("inf")
            if min(step, event) > end:
                self.clock.now = end
                return
            self.clock.now = min(step, event)
            if step <= event:
                self._apply()
            else:
                heapq.heappop(self._events)[2]()

    def _submit(self) -> None:
        while self.scheduler.may_plan(1) and (plan := self.scheduler.plan()) is not None:
            begins = self._flights[-1].ends if self._flights else self.clock.now
            seconds = STEP + TOKEN * plan.num_tokens
            self._flights.append(_Flight(plan, begins + seconds, seconds))
        self._ended(self.scheduler.take_finished())

    def _apply(self) -> None:
        plan, _, seconds = self._flights.popleft()
        result = StepResult(plan.step, np.full(plan.num_samples, 7, np.int32), seconds=seconds)
        confirmed = self.scheduler.apply(result)
        for request in confirmed.requests:
            request.first_token_at = request.first_token_at or self.clock.now
        self._ended([confirmed.requests[at] for at in confirmed.ends] + confirmed.finished)

    def _ended(self, requests: list[Request]) -> None:
        for request in requests:
            if request in self.on_end:
                self.on_end.pop(request)()


class Client:
    """Sends prompts of `tokens` tokens: each `gap` seconds after the answer to the last, `at_once` at a
    time."""

    def __init__(
        self,
        simulation: Simulation,
        name: str,
        tokens: int,
        *,
        output: int = 1,
        gap: float = 0.0,
        at_once: int = 1,
    ) -> None:
        self.sent: list[Request] = []
        self._simulation, self._gap = simulation, gap
        self._made = name, tokens, output
        for _ in range(at_once):
            self._send()

    @property
    def first_tokens(self) -> list[float]:
        """Seconds from request to first token."""
        return [r.first_token_at - r.arrival for r in self.sent if r.first_token_at]

    def _send(self) -> None:
        request = self._simulation.request(*self._made)
        self.sent.append(request)
        self._simulation.on_end[request] = lambda: self._simulation.after(self._gap, self._send)
        self._simulation.scheduler.add([request])


class Arrivals:
    """Requests that come at random, `rate` a second, from `callers` in turns by chance. Prompts have from the
    first to the second of `tokens`, evenly by their logarithm, and outputs of `output`. First tokens are due
    after `limit` seconds; None: at any time."""

    def __init__(
        self,
        simulation: Simulation,
        rate: float,
        limit: float | None,
        *,
        tokens: tuple[int, int] = (100, 4000),
        output: tuple[int, int] = (1, 1),
        callers: int = 1,
    ) -> None:
        self.taken: list[Request] = []
        self.refused = 0
        self._simulation, self._rate, self._limit = simulation, rate, limit
        self._tokens, self._output, self._callers = np.log(tokens), output, callers
        self._rng = np.random.default_rng(0)
        self._arrive()

    def in_time(self, limit: float) -> int:
        """Number of taken requests with their first token within `limit`."""
        return sum(0.0 < request.first_token_at <= request.arrival + limit for request in self.taken)

    def _arrive(self) -> None:
        simulation, rng = self._simulation, self._rng
        tokens, output = (
            int(np.exp(rng.uniform(*self._tokens))),
            int(rng.integers(*self._output, endpoint=True)),
        )
        request = simulation.request(str(rng.integers(self._callers)), tokens, output)
        if self._limit is not None:
            request.due = simulation.clock.now + self._limit
        try:
            simulation.scheduler.add([request])
            self.taken.append(request)
        except Overloaded:
            self.refused += 1
        simulation.after(rng.exponential(1.0 / self._rate), self._arrive)
