"""Time of `plan` + `apply` per step with decode rows only.

    python -m bench.core.scheduler

Bias: a fake executor that returns results at once. Page size 16: one row in sixteen takes a new page.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from bench.results import write
from core.cache.manager import CacheManager
from core.clock import monotonic
from core.config import ScheduleConfig
from core.executor import Capabilities
from core.plan import StepPlan, StepResult
from core.request import Request, SamplingParams
from core.schedule.scheduler import Scheduler

ROWS = 512
STEPS = 600
WARM = 60


def main() -> None:
    """Measure and write bench/results/scheduler.json."""
    rows = {str(n): _measure(n) for n in (32, 256, ROWS)}
    write("scheduler", {"unit": "microseconds per step, plan + apply", "rows": rows})


def _measure(rows: int) -> dict[str, float]:
    scheduler = _scheduler(rows)
    times: list[float] = []
    plan = scheduler.plan()
    for step in range(STEPS):
        assert plan is not None
        result = answer(plan)
        begun = time.perf_counter()
        scheduler.apply(result)
        plan = scheduler.plan()
        elapsed = time.perf_counter() - begun
        if step >= WARM:
            times.append(1e6 * elapsed)
    cut = statistics.quantiles(times, n=100)
    return {"p50": round(statistics.median(times), 1), "p90": round(cut[89], 1), "p99": round(cut[98], 1)}


def _scheduler(rows: int) -> Scheduler:
    pages = rows * (STEPS // 16 + 4)
    capabilities = Capabilities(
        num_pages=pages + 1,
        page_size=16,
        max_rows=rows,
        context_length=16_384,
        vocab_size=151_936,
        max_step_tokens=2048,
    )
    config = ScheduleConfig(step_tokens=rows * 32)
    scheduler = Scheduler(capabilities, CacheManager(pages + 1, 16), config, monotonic)
    rng = np.random.default_rng(0)
    for row in range(rows):
        # Different lengths, so that rows reach page boundaries in different steps.
        prompt = rng.integers(0, 1000, 8 + row % 16, np.int32)
        params = SamplingParams(max_tokens=STEPS + 8, stop_ids=frozenset({2, 151_643}))
        scheduler.add([Request(f"r{row}", prompt, params)])
    return scheduler


def answer(plan: StepPlan) -> StepResult:
    """A result with the same token for every row that samples."""
    return StepResult(plan.step, np.full(plan.num_samples, 7, np.int32))


if __name__ == "__main__":
    main()
