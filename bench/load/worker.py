"""One client process: runs its share of the requests on its own event loop, sends its records at the end."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import time
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from typing import Any

import msgspec
import uvloop

from bench.load.client import Client, Target
from bench.load.drive import Driver
from bench.load.prompts import Source
from bench.load.records import Record
from bench.load.workloads import Workload

TICK = 0.25
"""Seconds between progress messages."""


class WorkerConfig(msgspec.Struct, frozen=True):
    """Settings of one client process."""

    target: Target
    work: Workload
    model: str
    number: int
    count: int
    warmup: int


class Ready(msgspec.Struct, frozen=True):
    """Warm-up is done; the process waits for the start time."""


class Tick(msgspec.Struct, frozen=True):
    """Progress: finished requests and their output tokens."""

    done: int
    out: int


class End(msgspec.Struct, frozen=True):
    """The results: `records` is a msgpack list of `Record`; `cpu` the busy share of one core."""

    records: bytes
    cpu: float


def main(config: WorkerConfig, counter: Synchronized[int], pipe: Connection[Any, Any]) -> None:
    """Main function of a client process. SIGINT is ignored: the parent sends a stop command on Ctrl-C."""
    raise_file_limit()

    def take() -> int:
        with counter.get_lock():
            index = counter.value
            counter.value = index + 1
        return index

    uvloop.run(_work(config, take, pipe))


def raise_file_limit() -> None:
    """Raise the limit of open files to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _work(config: WorkerConfig, take: Callable[[], int], pipe: Connection[Any, Any]) -> None:
    client = Client(config.target, config.work.endpoint)
    driver = Driver(
        config.work, Source(config.work, config.model), client, (config.number, config.count), take
    )
    commands = _commands(pipe)
    # A garbage collection would add a pause to measured latencies; records hold no cycles, so none is
    # needed.
    gc.freeze()
    gc.disable()
    cpu = 0.0
    if await _unless_stopped(driver.warm(config.warmup), commands):
        pipe.send(Ready())
        start = await commands.get()
        if start is not None:
            before, since = time.process_time(), time.perf_counter()
            ticker = asyncio.create_task(_tick(driver.records, pipe))
            await _unless_stopped(driver.run(start), commands)
            ticker.cancel()
            cpu = (time.process_time() - before) / (time.perf_counter() - since)
    client.close()
    # `add_reader` has made the pipe non-blocking, but the records do not fit into its buffer.
    asyncio.get_running_loop().remove_reader(pipe.fileno())
    os.set_blocking(pipe.fileno(), True)
    pipe.send(End(msgspec.msgpack.encode(driver.records), cpu))


def _commands(pipe: Connection[Any, Any]) -> asyncio.Queue[float | None]:
    """Commands of the parent: a start time, or None to stop (also when the parent has died)."""
    loop = asyncio.get_running_loop()
    commands: asyncio.Queue[float | None] = asyncio.Queue()

    def read() -> None:
        try:
            commands.put_nowait(pipe.recv())
        except EOFError:
            loop.remove_reader(pipe.fileno())
            commands.put_nowait(None)

    loop.add_reader(pipe.fileno(), read)
    return commands


async def _unless_stopped(work: Coroutine[None, None, None], commands: asyncio.Queue[float | None]) -> bool:
    """Run `work` until it ends (True) or the parent sends stop (False)."""
    doing = asyncio.ensure_future(work)
    stop = asyncio.ensure_future(commands.get())
    await asyncio.wait((doing, stop), return_when=asyncio.FIRST_COMPLETED)
    if doing.done():
        stop.cancel()
        doing.result()
        return True
    doing.cancel()
    await asyncio.wait((doing,))
    return False


async def _tick(records: list[Record], pipe: Connection[Any, Any]) -> None:
    done, out = 0, 0
    while True:
        await asyncio.sleep(TICK)
        for record in records[done:]:  # only the new ones: a long run has very many
            done += 1
            out += record.out if record.bad is None else 0
        pipe.send(Tick(done, out))
