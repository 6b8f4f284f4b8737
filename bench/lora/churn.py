"""Running streams while adapters are loaded and unloaded.

Once a second, beside the streams, one short request is answered. In half of the runs its adapter is one that
is on the device. In the others it is loaded just before, from a file, and unloaded behind it: read into host
memory, copied to the device, forgotten.
"""

from __future__ import annotations

import asyncio
import gc
import time
from pathlib import Path

import msgspec

from bench.load.client import Client, Target
from bench.load.prompts import PreparedRequest, Source, changed
from bench.load.records import Record
from bench.load.workloads import Workload
from bench.neighbours import Figures, figures
from bench.servers import post

PERIOD = 1.0
"""Seconds from one short request to the next."""
PASSING = "passing"
"""Name of the adapter that comes and goes."""


def call(url: str, path: str, **body: str) -> float:
    """POST `body` as JSON. Returns the seconds it took. Raises `OSError` for an error's status."""
    began = time.perf_counter()
    post(url + path, body, 120)
    return time.perf_counter() - began


def load(url: str, name: str, path: Path) -> float:
    """Load an adapter. Returns the seconds it took."""
    return call(url, "/load_lora_adapter", lora_name=name, lora_path=str(path))


class Churn:
    """Runs against one server. Owner: event loop."""

    def __init__(self, url: str, work: Workload, names: list[str], path: Path) -> None:
        """Streams have the adapters `names` in turn, but for the last one, whose place on the device is for
        those that pass; these are read from `path`."""
        self._url, self._path, self._names, self._work = url, path, names, work
        self._client = Client(Target.of(url), work.endpoint)
        short = msgspec.structs.replace(work, name=f"{work.name} short", input_len=16, output_len=8)
        self._short = Source(short, names[-1])
        self._streams = Source(work, names[0])

    async def run(self, turn: int, passing: bool) -> Figures:
        """Figures of the streams, with adapters that come and go or without."""
        work, names = self._work, self._names[:-1] or self._names
        requests = [
            changed(self._streams.request(turn * work.concurrency + i), {"model": names[i % len(names)]})
            for i in range(work.concurrency)
        ]
        others: list[Record] = []
        gc.collect()
        gc.disable()  # a garbage collection of the client would show as a gap
        try:
            async with asyncio.TaskGroup() as group:
                streams = [group.create_task(self._client.send(each)) for each in requests]
                while not any(task.done() for task in streams):
                    began = time.perf_counter()
                    others.append(await self._beside(self._short.request(turn << 8 | len(others)), passing))
                    left = PERIOD - (time.perf_counter() - began)
                    await asyncio.wait(streams, timeout=max(left, 0), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gc.enable()
        return figures([task.result()[0] for task in streams], others)

    async def _beside(self, request: PreparedRequest, passing: bool) -> Record:
        if not passing:
            return (await self._client.send(request))[0]
        await asyncio.to_thread(load, self._url, PASSING, self._path)
        record, _ = await self._client.send(changed(request, {"model": PASSING}))
        await asyncio.to_thread(call, self._url, "/unload_lora_adapter", lora_name=PASSING)
        return record

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
