"""Step time of the device, and CPU time of launch thread, waiter thread and event loop.

    python -m bench.step --model DIR [--load-format dummy] [any flag of the server]

The step loop (apply, plan, submit) over the real executor, without HTTP and text. "decodeN": N rows decode
behind prompts of --context tokens; "mixed": a closed loop of prefill and decode; "prefill": the same with
prompts of four times --context; "shared": with prompts that share a prefix. Each case also runs "loaded":
--per-row microseconds of Python per row and step on the event loop, in slices, to simulate delivery. With
replicas (`--dp`) each runs the case, at once: tokens are of all, steps and their times of the first.

With `--host-only` no step does its work: no graph is replayed, no layer called. What is left of the launch
thread's time is our Python (on a GPU also two events), whatever the model and the device.

Bias: random token ids; the simulated delivery holds the GIL throughout, real delivery releases it in each
write.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import uvloop

from app.compose import load_executors
from app.settings import parse
from bench.experts import ExpertWatch
from bench.flags import add_name, command
from bench.lag import Lag
from bench.results import save
from bench.trace import KernelTrace
from core.cache.manager import CacheManager
from core.clock import monotonic
from core.command import CommandDone
from core.config import Config
from core.executor import Capabilities, Executor
from core.plan import StepFailure
from core.request import Request, SamplingParams
from core.schedule.scheduler import Scheduler
from gpu.build import spec_of
from gpu.step.graphs import Launches, Work

ROWS = (1, 32, 256, 512)
SLICE = 24
OCCUPIED = 0.975
WARM_STEPS = 20
KERNELS = 24
"""Kernels of a case in the results, the slowest ones."""

FILLED = 0.9
"""Share of the pages that the rows of a case may use. With more, the scheduler would keep some rows
waiting."""

PATIENCE = 60.0
"""Seconds in which all rows of a case must run."""


class Case(NamedTuple):
    """`output` 0: decode until the time is over; otherwise each output has that many tokens and is followed
    by a new prompt. The first `shared` tokens of all prompts are the same."""

    name: str
    rows: int
    context: int
    output: int = 0
    shared: int = 0


class Measurement(NamedTuple):
    """Measure a running case for `seconds`, then trace its kernels for `window` more; `watch` records
    experts."""

    seconds: float
    window: float = 0.0
    watch: ExpertWatch | None = None


class Driver:
    """The step loop without delivery, and counters. Owner: event loop."""

    def __init__(self, executor: Executor, config: Config) -> None:
        self._executor = executor
        caps = executor.capabilities
        self._depth = config.schedule.overlap_depth
        self.budget = caps.max_step_tokens
        self._per_row = 0.0
        cache = CacheManager(caps.num_pages, caps.page_size)
        self.scheduler = Scheduler(caps, cache, config.schedule, monotonic)
        self._rng = np.random.default_rng(1)
        self._case = Case("", 0, 0)
        self._made = 0
        self._slices: deque[int] = deque()
        self.steps: list[tuple[float, float]] = []
        """Arrival of each result and the device's seconds for it."""
        self.tokens = 0
        self.failure = ""

    def start(self) -> None:
        """Start the executor."""
        loop = asyncio.get_running_loop()

        def wake() -> None:
            loop.call_soon_threadsafe(self.tick)

        self._executor.start(wake)

    def begin(self, case: Case, per_row: float) -> None:
        """Add the requests of `case`."""
        self._case, self._per_row = case, per_row
        self.scheduler.add([self._request(row) for row in range(case.rows)])
        self.tick()

    def end(self) -> None:
        """Abort all requests and add no new ones."""
        self._case = self._case._replace(rows=0)
        for request in self.scheduler.requests():
            self.scheduler.abort(request)

    def _request(self, row: int) -> Request:
        self._made += 1
        caps, case = self._executor.capabilities, self._case
        prompt = self._rng.integers(1, caps.vocab_size - 1, case.context).astype(np.int32)
        prompt[: case.shared] = np.arange(1, case.shared + 1)
        # The first outputs have different lengths, so that later ones do not end together.
        most = case.output or min(caps.context_length, room(caps, case.rows)) - case.context
        if case.output and row >= 0:
            most = 1 + row * case.output // case.rows
        return Request(f"r{self._made}", prompt, SamplingParams(temperature=0.0, max_tokens=most))

    def tick(self) -> None:
        """Run one iteration: apply results, submit plans, then simulate the load of delivery."""
        now = time.perf_counter()
        for result in self._executor.results():
            if isinstance(result, StepFailure | CommandDone):
                self.failure = str(result)
                continue
            confirmed = self.scheduler.apply(result)
            self.steps.append((now, result.seconds))
            self.tokens += len(confirmed.tokens)
            if self._case.output and confirmed.ends and self._case.rows:
                self.scheduler.add([self._request(-1) for _ in confirmed.ends])
            if self._per_row:
                rows = len(confirmed.tokens)
                self._slices.extend(min(SLICE, rows - first) for first in range(0, rows, SLICE))
        while self.scheduler.may_plan(self._depth) and (plan := self.scheduler.plan()) is not None:
            self._executor.submit(plan)
        self.scheduler.take_finished()
        if self._slices:
            asyncio.get_running_loop().call_soon(self._burn)

    def _burn(self) -> None:
        if not self._slices:
            return
        until = time.perf_counter() + self._slices.popleft() * self._per_row
        while time.perf_counter() < until:
            pass
        asyncio.get_running_loop().call_soon(self._burn)


def room(caps: Capabilities, rows: int) -> int:
    """Tokens of prompt and output that each of `rows` requests may have."""
    return int(FILLED * (caps.num_pages - 1) * caps.page_size) // max(rows, 1)


class CpuTimes:
    """CPU seconds of the executors' threads and of the calling one. `launch` is that of one GPU; of several
    they are `launch-0`, `launch-1` ..., by replica and rank."""

    def __init__(self) -> None:
        self._clocks = {"loop": time.CLOCK_THREAD_CPUTIME_ID}
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("loom-")]
        kinds = [thread.name.split("-")[1] for thread in threads]
        for at, (kind, thread) in enumerate(zip(kinds, threads, strict=True)):
            name = kind if kinds.count(kind) == 1 else f"{kind}-{kinds[:at].count(kind)}"
            assert thread.ident is not None
            self._clocks[name] = time.pthread_getcpuclockid(thread.ident)

    def read(self) -> dict[str, float]:
        return {name: time.clock_gettime(clock) for name, clock in self._clocks.items()}


async def trace(driver: Driver, seconds: float) -> dict[str, Any]:
    """Trace kernels of the running case. Tracing slows steps down, so nothing else is measured meanwhile."""
    first, recorder = len(driver.steps), KernelTrace()
    await asyncio.sleep(seconds)
    times, busy = recorder.stop(len(driver.steps) - first)
    return {"kernels_busy": round(busy, 4), "kernels": [each._asdict() for each in times[:KERNELS]]}


def routed(watch: ExpertWatch | None, case: Case) -> dict[str, Any]:
    """Distinct experts that the rows of a step are routed to."""
    if watch is None:
        return {}
    found, even = watch.distinct(case.rows)
    return {"distinct_experts": round(found, 1), "distinct_if_even": round(even, 1)}


async def measure(
    drivers: Sequence[Driver], case: Case, per_row: float, measurement: Measurement
) -> dict[str, Any]:
    """Start the rows of a case in each replica, wait until all run, measure."""
    for driver in drivers:
        driver.begin(case, per_row)
    for driver in drivers:
        await settle(driver, case)
    driver, times, lag = drivers[0], CpuTimes(), Lag()
    first, tokens = len(driver.steps), sum(each.tokens for each in drivers)
    before, begun = times.read(), time.perf_counter()
    await asyncio.sleep(measurement.seconds)
    wall, after = time.perf_counter() - begun, times.read()
    made = sum(each.tokens for each in drivers) - tokens
    steps, lags = driver.steps[first:], lag.stop()
    more = routed(measurement.watch, case)
    if measurement.window and not per_row:
        more |= await trace(driver, measurement.window)
    for each in drivers:
        each.end()
    while not all(each.scheduler.idle for each in drivers):
        await asyncio.sleep(0.01)
    count = len(steps)
    host = {name: 1e6 * (after[name] - before[name]) / count for name in after}
    host["loop"] /= len(drivers)  # one loop has the steps of all
    return more | {
        "case": case.name,
        "rows": case.rows,
        "context": case.context,
        "loaded_us_per_row": round(1e6 * per_row, 1),
        "steps": count,
        "tokens_per_s": round(made / wall),
        "period_ms": round(1e3 * wall / count, 3),
        "gpu_ms_p50": round(1e3 * statistics.median(spent for _, spent in steps), 3),
        "occupancy": round(sum(spent for _, spent in steps) / wall, 4),
        "windows_occupied": _windows(steps, begun, wall),
        "host_us_per_step": {name: round(spent, 1) for name, spent in host.items()},
        "loop_lag_p99_ms": round(1e3 * lags[int(len(lags) * 0.99)], 2) if lags else None,
    }


async def settle(driver: Driver, case: Case) -> None:
    """Wait until all rows of the case decode."""
    late = time.perf_counter() + PATIENCE
    while driver.scheduler.running < case.rows and not case.output:
        await asyncio.sleep(0.01)
        if driver.failure or time.perf_counter() > late:
            raise RuntimeError(driver.failure or f"{driver.scheduler.running} of {case.rows} rows run")
    # Some prompts may still be in prefill: wait for as many steps as they can take.
    settled = len(driver.steps) + WARM_STEPS + case.rows * case.context // driver.budget
    while len(driver.steps) < settled:
        await asyncio.sleep(0.01)


def _windows(steps: list[tuple[float, float]], begun: float, wall: float) -> float:
    """Share of the seconds in which the device was busy for at least `OCCUPIED` of the time."""
    inside = np.zeros(max(int(wall), 1))
    for at, spent in steps:
        end, start = at - begun, at - begun - spent
        for second in range(max(int(start), 0), min(int(end) + 1, len(inside))):
            inside[second] += max(min(end, second + 1) - max(start, second), 0.0)
    return round(float((inside >= OCCUPIED).mean()), 3)


async def run(
    executors: Sequence[Executor], config: Config, args: argparse.Namespace, measurement: Measurement
) -> AsyncIterator[dict[str, Any]]:
    """All cases, each with an idle and a loaded event loop."""
    drivers = [Driver(executor, config) for executor in executors]
    for driver in drivers:
        driver.start()
    caps = executors[0].capabilities
    rows = [n for n in args.rows if n <= caps.max_rows]
    cases = [Case(f"decode{n}", n, min(args.context, room(caps, n) // 2)) for n in rows]
    cases.append(Case("mixed", rows[-1] // 2 or 1, args.context, args.output))
    cases.append(Case("prefill", min(rows[-1], 32), 4 * args.context, 8))
    cases.append(Case("shared", min(rows[-1], 128), 2 * args.context + 128, 128, 2 * args.context))
    cases = [case for case in cases if not args.only or case.name in args.only]
    try:
        for case in cases:
            for load in (0.0, args.per_row / 1e6):
                yield await measure(drivers, case, load, measurement)
    finally:
        for executor in executors:
            executor.close()


async def report(cases: AsyncIterator[dict[str, Any]], name: str, about: dict[str, Any]) -> None:
    """Print and save each case when it is measured."""
    found = []
    async for case in cases:
        show(case)
        found.append(case)
        save(name, about | {"cases": found})


def no_work(launches: Launches[Any], key: object) -> Work:
    """Work that does nothing, in place of the launches, for `--host-only`."""
    return lambda: None


def show(found: dict[str, Any]) -> None:
    """Print a case on one line, and each of its kernels."""
    print({name: value for name, value in found.items() if name != "kernels"}, flush=True)
    for each in found.get("kernels", ()):
        print(
            f"  {each['us_per_step']:9.1f} us  {each['per_step']:6.1f} x {each['us_each']:8.2f}  "
            f"{each['name']} < {each['before']}",
            flush=True,
        )


def main() -> None:
    """Measure and write bench/results/NAME.json."""
    parser = command(__doc__)
    add_name(parser, "step")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument(
        "--context", type=int, default=1024, help="tokens of a prompt, fewer if the pool is too small"
    )
    parser.add_argument("--output", type=int, default=256, help="output tokens in the mixed case")
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each measurement")
    parser.add_argument("--only", nargs="+", help="cases to run: decodeROWS, mixed, prefill, shared")
    parser.add_argument("--experts", action="store_true", help="count distinct experts")
    parser.add_argument("--trace", type=float, default=0.0, help="seconds of kernel tracing in each case")
    parser.add_argument(
        "--per-row", type=float, default=8.0, help="microseconds of event loop time per row when loaded"
    )
    parser.add_argument("--host-only", action="store_true", help="run steps without their work")
    args, rest = parser.parse_known_args()
    config = parse(rest)
    if (args.trace or args.experts) and (config.model.device == "cpu" or not torch.cuda.is_available()):
        parser.error("--trace and --experts need a GPU")
    source = Path(config.model.model)
    begun = time.perf_counter()
    watch = ExpertWatch(spec_of(source), max(args.rows), torch.device("cuda")) if args.experts else None
    if args.host_only:
        Launches.__getitem__ = no_work  # type: ignore[method-assign]
    executors = load_executors(config, lambda stage, share: None)
    start = time.perf_counter() - begun
    about = {
        "device": executors[0].capabilities.device,
        "attention_backend": executors[0].capabilities.attention_backend,
        "tp": config.parallel.tp,
        "dp": len(executors),
        "build_s": round(start, 2),
        "host_only": args.host_only,
    }
    cases = run(executors, config, args, Measurement(args.seconds, args.trace, watch))
    uvloop.run(report(cases, args.name, about))


if __name__ == "__main__":
    main()
