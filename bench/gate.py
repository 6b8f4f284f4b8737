"""Whether HTTP slows the device down: `python -m bench.gate --model configs/models/qwen3-8b [flags]`.

1,000 closed-loop clients for each replica stream from a server with at most 512 running requests. Then the
same requests run in the scheduler and executor alone (apply, plan, submit), without HTTP, text or clients.
Two figures and their targets:

    occupied  share of the seconds in which the device was busy for at least 97.5%     0.90
    ratio     output tokens per second with HTTP over without                          0.97

Readings are one second apart; the busy share is the device time between two readings over the time between
the last steps before each. Of replicas (`--dp`) `occupied` is that of the least busy one, and each runs up to
512 requests. Bias: the clients share the server's cores.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import uvloop

from app.compose import load_executors
from app.settings import parse
from bench.flags import add_name, add_sizes, command, sized
from bench.load.main import main as load
from bench.load.prompts import Source
from bench.load.workloads import Workload
from bench.results import write
from bench.servers import SERVER, serving
from core.cache.manager import CacheManager
from core.clock import monotonic
from core.config import Config
from core.executor import Executor
from core.plan import StepResult
from core.request import Request, SamplingParams
from core.schedule.scheduler import Scheduler

OCCUPIED = 0.975
PERIOD = 1.0
"""Seconds between two readings."""


class Reading(NamedTuple):
    """Time of the last applied step on the server's clock, device seconds of all steps, running requests."""

    at: float
    spent: float
    running: int


def occupied(readings: Sequence[Reading], rows: int) -> tuple[float, int]:
    """Share of the windows between readings in which the device was busy for at least `OCCUPIED` of the time,
    and the number of windows; only windows with at least `rows` running requests count."""
    full = [(a, b) for a, b in pairwise(readings) if min(a.running, b.running) >= rows and b.at > a.at]
    busy = [(b.spent - a.spent) / (b.at - a.at) >= OCCUPIED for a, b in full]
    return (sum(busy) / len(busy) if busy else 0.0), len(busy)


class Watch:
    """Reads the state of the server's replicas every `PERIOD` in a thread, until it is stopped."""

    def __init__(self, url: str) -> None:
        self.readings: list[list[Reading]] = []
        """Readings of each replica."""
        self._url = url + "/server_info"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        """Wait for the last reading."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(PERIOD):
            with urllib.request.urlopen(self._url, timeout=30) as answer:
                states = json.load(answer)["internal_states"]
            self.readings = self.readings or [[] for _ in states]
            for readings, state in zip(self.readings, states, strict=True):
                running = state["scheduler"]["running"]
                readings.append(Reading(state["last_step_at"], state["device_seconds"], running))


def through_http(flags: list[str], work: Workload) -> dict[str, float]:
    """Figures of `work` over HTTP."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output.json"
        with serving([*SERVER, *flags], Path(folder) / "server.log") as url:
            watch = Watch(url)
            sizes = ("input_len", "output_len", "concurrency", "requests", "vocab_low", "vocab_high")
            load_flags = [
                part for name in sizes for part in ("--" + name.replace("_", "-"), str(getattr(work, name)))
            ]
            status = load(["--url", url, "--workload", work.name, *load_flags, "--output", str(output)])
            watch.stop()
        if status:
            raise SystemExit(status)
        (result,) = json.loads(output.read_text())
    rows = [max(each.running for each in readings) for readings in watch.readings]
    shares = [occupied(readings, most) for readings, most in zip(watch.readings, rows, strict=True)]
    return {
        "running": sum(rows),
        "occupied": round(min(share for share, _ in shares), 3),
        "seconds": min(seconds for _, seconds in shares),
        "out_tok_s": result["out_tok_s"],
    }


class EngineOnly:
    """Runs requests through scheduler and executor, without HTTP. Owner: event loop."""

    def __init__(self, executor: Executor, config: Config, requests: Iterator[Request]) -> None:
        caps = executor.capabilities
        self._executor = executor
        self._depth = config.schedule.overlap_depth
        cache = CacheManager(caps.num_pages, caps.page_size)
        self._scheduler = Scheduler(caps, cache, config.schedule, monotonic)
        self._left = requests
        self._tokens = 0
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, count: int) -> int:
        """Start the executor. The output tokens of all that is taken from the requests, `count` at a time."""
        loop = asyncio.get_running_loop()

        def wake() -> None:
            loop.call_soon_threadsafe(self.tick)

        self._executor.start(wake)
        self._add(count)
        self.tick()
        await self._done
        return self._tokens

    def _add(self, count: int) -> None:
        self._scheduler.add([request for _, request in zip(range(count), self._left, strict=False)])

    def tick(self) -> None:
        """Run one iteration of the step loop. An exception fails the run: the event loop would only log
        it."""
        try:
            self._step()
        except Exception as error:
            if not self._done.done():
                self._done.set_exception(error)

    def _step(self) -> None:
        for result in self._executor.results():
            if not isinstance(result, StepResult):
                self._done.set_exception(RuntimeError(str(result)))
                return
            confirmed = self._scheduler.apply(result)
            self._tokens += len(confirmed.tokens)
            self._add(len(confirmed.ends))
        while self._scheduler.may_plan(self._depth) and (plan := self._scheduler.plan()) is not None:
            self._executor.submit(plan)
        self._scheduler.take_finished()
        if self._scheduler.idle and not self._done.done():
            self._done.set_result(None)


def requests_of(work: Workload) -> Iterator[Request]:
    """The requests that `through_http` sends."""
    source = Source(work, "model")
    for index in range(work.requests):
        ids = np.array(msgspec.json.decode(source.request(index).body)["prompt"], np.int32)
        yield Request(f"r{index}", ids, SamplingParams(temperature=0.0, max_tokens=work.output_len))


async def alone(executors: Sequence[Executor], config: Config, work: Workload) -> float:
    """Output tokens per second of `work` without HTTP."""
    requests = requests_of(work)
    runs = [EngineOnly(executor, config, requests) for executor in executors]
    try:
        begun = time.perf_counter()
        tokens = await asyncio.gather(*(run.run(work.concurrency // len(runs)) for run in runs))
        return sum(tokens) / (time.perf_counter() - begun)
    finally:
        for executor in executors:
            executor.close()


def main() -> None:
    """Measure and write bench/results/NAME.json."""
    parser = command(__doc__)
    add_name(parser, "gate")
    parser.add_argument("--clients", type=int, default=1_000, help="of each replica")
    parser.add_argument("--requests", type=int, default=4_000, help="of each replica")
    add_sizes(parser, 64, 256)
    args, flags = parser.parse_known_args()
    config = parse([*SERVER, *flags])
    dp = config.parallel.dp
    work = sized("gate", args, concurrency=args.clients * dp, requests=args.requests * dp)
    found: dict[str, Any] = dict(through_http(flags, work))
    executors = load_executors(config, lambda stage, share: None)
    found["alone_out_tok_s"] = round(uvloop.run(alone(executors, config, work)), 1)
    found["ratio"] = round(found["out_tok_s"] / found["alone_out_tok_s"], 4)
    about = {"device": executors[0].capabilities.device, "tp": config.parallel.tp, "dp": len(executors)}
    write(args.name, {**about, "clients": work.concurrency, **found})


if __name__ == "__main__":
    main()
