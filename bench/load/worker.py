"""One client process: its own loop, its share of the requests, its records sent back at the end."""

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
"""Seconds between progress messages: often enough for a bar, too seldom to cost anything."""


class Share(msgspec.Struct, frozen=True):
    """What a client process is told."""

    target: Target
    work: Workload
    model: str
    number: int
    count: int
    warmup: int


class Ready(msgspec.Struct, frozen=True):
    """Warm, waiting for the start time."""


class Tick(msgspec.Struct, frozen=True):
    """So many requests are done, with so many output tokens."""

    done: int
    out: int


class End(msgspec.Struct, frozen=True):
    """All there is: `records` is a msgpack list of `Record`; `cpu` the busy share of one core."""

    records: bytes
    cpu: float


def main(share: Share, counter: Synchronized[int], pipe: Connection[Any, Any]) -> None:
    """Body of a client process. Ctrl-C is the parent's business: it says stop through the pipe.

    The signal is ignored here since before this process was started.
    """
    raise_file_limit()

    def take() -> int:
        with counter.get_lock():
            index = counter.value
            counter.value = index + 1
        return index

    uvloop.run(_work(share, take, pipe))


def raise_file_limit() -> None:
    """As many sockets as the system lets us have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _work(share: Share, take: Callable[[], int], pipe: Connection[Any, Any]) -> None:
    client = Client(share.target, share.work.endpoint)
    driver = Driver(share.work, Source(share.work, share.model), client, (share.number, share.count), take)
    orders = _orders(pipe)
    # A collection in the middle of a run would be a pause in every latency it meets; records hold no
    # cycles, so nothing is lost by having none.
    gc.freeze()
    gc.disable()
    cpu = 0.0
    if await _unless_stopped(driver.warm(share.warmup), orders):
        pipe.send(Ready())
        start = await orders.get()
        if start is not None:
            before, since = time.process_time(), time.perf_counter()
            ticker = asyncio.create_task(_tick(driver.records, pipe))
            await _unless_stopped(driver.run(start), orders)
            ticker.cancel()
            cpu = (time.process_time() - before) / (time.perf_counter() - since)
    client.close()
    # Reading it on the loop has made the pipe non-blocking, and the records do not fit its buffer.
    asyncio.get_running_loop().remove_reader(pipe.fileno())
    os.set_blocking(pipe.fileno(), True)
    pipe.send(End(msgspec.msgpack.encode(driver.records), cpu))


def _orders(pipe: Connection[Any, Any]) -> asyncio.Queue[float | None]:
    """What the parent says: a start time, or None to stop (also when the parent is gone)."""
    loop = asyncio.get_running_loop()
    orders: asyncio.Queue[float | None] = asyncio.Queue()

    def read() -> None:
        try:
            orders.put_nowait(pipe.recv())
        except EOFError:
            loop.remove_reader(pipe.fileno())
            orders.put_nowait(None)

    loop.add_reader(pipe.fileno(), read)
    return orders


async def _unless_stopped(work: Coroutine[None, None, None], orders: asyncio.Queue[float | None]) -> bool:
    """Run `work` until it ends (True) or the parent says stop (False)."""
    doing = asyncio.ensure_future(work)
    stop = asyncio.ensure_future(orders.get())
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
