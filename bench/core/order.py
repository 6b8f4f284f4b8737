"""Time of `plan` while long prompts wait, by schedule policy.

    python -m bench.core.order

117 prompts of 4,000 tokens share a cached prefix of 2,000 and wait for free pages while 8 rows decode.
`steady` is a step without a new request, `new` one after a new request, `burst` the first step after all
arrived at once. Bias: a fake executor that returns results at once.
"""

from __future__ import annotations

import statistics
import time
from typing import get_args

import numpy as np

from bench.core.scheduler import answer
from bench.results import write
from core.cache.manager import CacheManager
from core.clock import monotonic
from core.config import ScheduleConfig, SchedulePolicy
from core.executor import Capabilities
from core.plan import StepPlan
from core.request import Request, SamplingParams
from core.schedule.scheduler import Scheduler

WAITING = 117
PROMPT = 4000
SHARED = 2000
ROWS = 8
STEPS = 100
SPARE = 250
"""Free pages: enough for the growth of the running rows, too few to admit a waiting request."""


def main() -> None:
    """Measure and write bench/results/order.json."""
    orders = {policy: _measure(policy) for policy in get_args(SchedulePolicy)}
    write("order", {"unit": "microseconds of plan, median", "waiting": WAITING, "orders": orders})


class _Load:
    """A scheduler with running rows, and too few pages to admit others."""

    def __init__(self, policy: SchedulePolicy) -> None:
        pages = PROMPT // 16 + SPARE
        capabilities = Capabilities(
            num_pages=pages + 1,
            page_size=16,
            max_rows=64,
            context_length=16_384,
            vocab_size=151_936,
            max_step_tokens=8192,
        )
        config = ScheduleConfig(step_tokens=8192, order=policy, conservativeness=0.1)
        self.scheduler = Scheduler(capabilities, CacheManager(pages + 1, 16), config, monotonic)
        self._rng = np.random.default_rng(0)
        self._prefix = self._rng.integers(0, 1000, SHARED, np.int32)
        self._count = 0
        self._add(np.resize(self._prefix, PROMPT), 4000)
        for _ in range(ROWS - 1):
            self._add(self._rng.integers(0, 1000, 16, np.int32), 4000)
        self.step()

    def arrive(self, count: int) -> None:
        """Add `count` prompts that begin with a part of the cached prefix."""
        for _ in range(count):
            cut = int(self._rng.integers(SHARED // 2, SHARED))
            own = self._rng.integers(0, 1000, PROMPT - cut, np.int32)
            self._add(np.concatenate([self._prefix[:cut], own]), 4000)

    def _add(self, prompt: np.ndarray, max_tokens: int) -> None:
        self._count += 1
        self.scheduler.add([Request(f"r{self._count}", prompt, SamplingParams(max_tokens=max_tokens))])

    def step(self) -> float:
        """Run one step. Returns the microseconds of `plan`."""
        begun = time.perf_counter()
        plan = self.scheduler.plan()
        elapsed = time.perf_counter() - begun
        if isinstance(plan, StepPlan):
            self.scheduler.apply(answer(plan))
        return 1e6 * elapsed


def _measure(policy: SchedulePolicy) -> dict[str, float]:
    bursts = []
    for _ in range(9):
        load = _Load(policy)
        load.arrive(WAITING)
        bursts.append(load.step())
    steady = [load.step() for _ in range(STEPS)]
    new = []
    for _ in range(STEPS):
        load.arrive(1)
        new.append(load.step())
        load.scheduler.abort(load.scheduler.requests()[-1])
        load.step()
    waiting = load.scheduler.statistics().waiting
    assert waiting == WAITING, f"{waiting} requests wait, expected {WAITING}: some were admitted"
    figures = {"steady": steady, "new": new, "burst": bursts}
    return {name: round(statistics.median(times), 1) for name, times in figures.items()}


if __name__ == "__main__":
    main()
