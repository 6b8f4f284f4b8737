"""What a change of scheduling would do to the table, without a GPU: `python -m bench.predict`.

The scenarios' closed loops through the real scheduler, one step planned ahead, over a device that takes as
long as steps of an H200 were measured to take: tables of products and experts by rows, rates of attention and
of what is done to a token. As things are, and paced (`--mixed-tokens 2048`); measured, in brackets:

                       c32              c256             prefill            short512
    8B                 3,678 (3,761)    6,240 (6,375)    41,793 (42,095)    19,976 (18,663)
    30B-A3B            1,986 (2,068)    7,291 (7,496)    69,761 (71,397)    20,600 (20,299)
    30B-A3B, paced     1,976 (2,052)    7,058 (7,094)                       20,104 (20,238)

Before steps of 2,048 tokens had been measured it said 7,770 for the paced 256 callers: what it has no figure
of it does not know.

Bias: answers cost the loop nothing, so 512 short rows come out 6 to 9% fast; no cascade, so `shared` is left
out; every answer has its whole length.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
import sys
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from bench.load.workloads import SCENARIOS, Workload
from core.cache.manager import CacheManager
from core.config import ScheduleConfig
from core.executor import Capabilities
from core.plan import StepPlan, StepResult
from core.request import Request, SamplingParams
from core.schedule.scheduler import Scheduler
from gpu.step.shapes import decode_sizes, fit, mixed_sizes

Table = Mapping[int, float]
"""Microseconds by rows; between them in a line, and behind the last in proportion."""

TURN = 1.5e-3
"""Seconds from an answer's end to its client's next request."""

WHOLE = 8192
"""Tokens of a step on a GPU."""

PAGES, PAGE, ROWS = 45_000, 16, 512


class StepTimes(NamedTuple):
    """Microseconds a layer: `products` of all kinds by tokens, `token` for what is done to each, `least` of
    that; `own` for each key of a decode row, `seen` for each query and key of a prompt. `head` once a step,
    by rows that sample."""

    layers: int
    products: Table
    token: float
    least: float
    own: float
    seen: float
    head: Table


MODELS = {
    "qwen3-8b": StepTimes(
        36,
        {1: 88, 8: 92, 32: 102, 64: 112, 128: 137, 256: 168, 512: 305, 1024: 585, 2048: 1150, 4096: 2250}
        | {8192: 4405},
        0.046,
        10.0,
        1.11e-3,
        3.36e-5,
        {1: 360, 32: 365, 256: 580, 512: 1110},
    ),
    "qwen3-30b-a3b": StepTimes(
        48,
        {1: 29, 2: 48, 4: 85, 8: 128, 16: 186, 32: 264, 64: 295, 128: 306, 256: 319, 512: 349, 1024: 390}
        | {2048: 605, 4096: 859, 8192: 1726},
        0.0177,
        17.0,
        5.4e-4,
        3.05e-5,
        {1: 210, 32: 220, 256: 360, 512: 630},
    ),
}
"""Of `bench/results/step-*.json` and `experts-h200.json`; at thousands of tokens as inside a step, at the
power limit; the 30B's 2,048 of what its paced steps took."""


def interpolated(table: Table, rows: int) -> float:
    """Of a table at so many rows."""
    known = [*table]
    if rows > known[-1]:
        return table[known[-1]] * rows / known[-1]
    return float(np.interp(rows, known, [*table.values()]))


class Device:
    """How long a step takes, in seconds."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._decode, self._mixed = decode_sizes(ROWS), mixed_sizes(WHOLE)

    def seconds(self, plan: StepPlan, keys: int) -> float:
        """Of a plan whose decode rows have so many keys together."""
        times, rows = self._times, len(plan.decode_slots)
        tokens = rows + sum(len(chunk.tokens) for chunk in plan.chunks)
        padded = fit(self._mixed if plan.chunks else self._decode, tokens)
        layer = interpolated(times.products, padded) + max(times.least, times.token * padded)
        layer += max(9.0, times.own * keys) if rows else 0.0
        if plan.chunks:
            seen = sum(len(c.tokens) * (c.start + len(c.tokens) / 2) for c in plan.chunks)
            layer += 11.0 + times.seen * seen
        return 1e-6 * (times.layers * layer + interpolated(times.head, max(plan.num_samples, 1)))


class ClosedLoop:
    """A scenario's callers, the scheduler, and steps one after the other."""

    def __init__(self, work: Workload, device: Device, config: ScheduleConfig) -> None:
        self._work, self._device = work, device
        self.now = 0.0
        self._free = 0.0
        """When the device is through with what it was given."""
        capabilities = Capabilities(
            num_pages=PAGES,
            page_size=PAGE,
            max_rows=ROWS,
            context_length=16_384,
            vocab_size=151_936,
            max_step_tokens=config.step_tokens,
            count_rows=1,
        )
        self._scheduler = Scheduler(capabilities, CacheManager(PAGES, PAGE), config, lambda: self.now)
        self._lengths = np.zeros(ROWS + 1, np.int64)
        self._rng = np.random.default_rng(0)
        self._born: dict[str, float] = {}
        self._said: dict[str, float] = {}
        self.firsts: list[float] = []
        self.gaps: list[float] = []
        self.made = 0

    def run(self) -> None:
        """Until the last answer has ended."""
        due = [0.004 * at / self._work.concurrency for at in range(self._work.concurrency)]
        asked, ended, flying = len(due), 0, list[tuple[float, StepPlan]]()
        while ended < self._work.requests:
            while due and due[0] <= self.now:
                self._ask(heapq.heappop(due))
            while len(flying) < 2 and (plan := self._scheduler.plan()) is not None:
                self._free = max(self._free, self.now) + self._device.seconds(plan, self._keys(plan))
                flying.append((self._free, plan))
            if not flying:
                self.now = due[0]
                continue
            self.now, plan = flying.pop(0)
            over = self._apply(plan)
            ended += over
            for _ in range(min(over, self._work.requests - asked)):
                heapq.heappush(due, self.now + TURN)
                asked += 1

    def _ask(self, at: float) -> None:
        prompt = self._rng.integers(1_000, 90_000, self._work.input_len, np.int32)
        request = Request(f"r{len(self._born)}", prompt, SamplingParams(max_tokens=self._work.output_len))
        self._born[request.id] = at
        self._scheduler.add([request])

    def _keys(self, plan: StepPlan) -> int:
        """Of the decode rows; the lengths behind the step are kept."""
        for chunk in plan.chunks:
            self._lengths[chunk.slot] = chunk.start + len(chunk.tokens)
        self._lengths[plan.decode_slots] += 1
        return int(self._lengths[plan.decode_slots].sum())

    def _apply(self, plan: StepPlan) -> int:
        """How many answers ended."""
        told = self._scheduler.apply(StepResult(plan.step, np.full(plan.num_samples, 7, np.int32)))
        for request in told.requests:
            if request.id in self._said:
                self.gaps.append(self.now - self._said[request.id])
            else:
                self.firsts.append(self.now - self._born[request.id])
            self._said[request.id] = self.now
        self.made += len(told.tokens)
        return len(told.ends)


def figures(model: str, work: Workload, config: ScheduleConfig) -> dict[str, tuple[float, int]]:
    """Rates, and in milliseconds what callers wait for; each with the digits that mean something."""
    loop = ClosedLoop(work, Device(MODELS[model]), config)
    loop.run()
    return {
        "out_tok_s": (loop.made / loop.now, 0),
        "tot_tok_s": ((loop.made + work.requests * work.input_len) / loop.now, 0),
        "ttft_ms": (1e3 * statistics.median(loop.firsts), 0),
        "itl_ms": (1e3 * statistics.median(loop.gaps), 1),
        "itl_p99_ms": (1e3 * statistics.quantiles(loop.gaps, n=100)[98], 1),
    }


def main() -> int:
    """Print them: what is reckoned is no result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenario", nargs="+", default=["c32", "c256", "prefill", "short512"])
    parser.add_argument("--step-tokens", type=int, default=WHOLE)
    parser.add_argument("--mixed-tokens", type=int, nargs="+", default=[0])
    asked = parser.parse_args()
    for model in MODELS:
        for name in asked.scenario:
            for mixed in asked.mixed_tokens:
                config = ScheduleConfig(step_tokens=asked.step_tokens, mixed_tokens=mixed)
                found = figures(model, SCENARIOS[name], config)
                told = "  ".join(f"{key} {value:8,.{digits}f}" for key, (value, digits) in found.items())
                print(f"{model:14} {name:9} mixed {mixed:5}  {told}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
