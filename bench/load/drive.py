"""Sends a workload: the callers of a closed loop, the arrivals of an open one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from bench.load.client import Client
from bench.load.prompts import History, Source
from bench.load.records import Record
from bench.load.workloads import Workload


class Driver:
    """One client process's share of a workload. Owner: event loop of a client process.

    `records` grows as requests end, so that an interrupted run keeps its results.
    """

    __slots__ = ("_client", "_count", "_number", "_source", "_take", "_work", "records")

    def __init__(
        self, work: Workload, source: Source, client: Client, part: tuple[int, int], take: Callable[[], int]
    ) -> None:
        """`part`: (this process, of how many); `take`: the next index, unique over all processes."""
        self._work = work
        self._source = source
        self._client = client
        self._number, self._count = part
        self._take = take
        self.records: list[Record] = []

    async def warm(self, requests: int) -> None:
        """Send this process's share of `requests` warm-up requests, which are not measured."""
        todo = iter(range(self._number, requests, self._count))

        async def caller() -> None:
            for index in todo:
                await self._client.send(self._source.warm(index))

        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._callers, requests)):
                group.create_task(caller())

    async def run(self, start: float) -> None:
        """Send all requests, from `start` on (`time.perf_counter`). Cancelling it keeps `records`."""
        arrivals = self._source.arrivals()
        async with asyncio.TaskGroup() as group:
            if arrivals is None:
                await _until(start)
                for _ in range(self._callers):
                    group.create_task(self._caller())
                return
            for index in range(self._number, len(arrivals), self._count):
                planned = start + float(arrivals[index])
                await _until(planned)
                group.create_task(self._conversation(index, planned))

    @property
    def _callers(self) -> int:
        work, rest = divmod(self._work.concurrency, self._count)
        return work + (self._number < rest)

    async def _caller(self) -> None:
        while (index := self._take()) < len(self._source):
            await self._conversation(index, None)

    async def _conversation(self, index: int, planned: float | None) -> None:
        history: History = []
        keep = self._work.turns > 1
        for turn in range(self._work.turns):
            request = self._source.request(index, turn, history)
            record, answer = await self._client.send(request, planned, keep)
            self.records.append(record)
            if record.bad is not None:
                return  # the next turn needs this answer
            if keep:
                history.append({"role": "user", "content": self._source.user(request)})
                history.append({"role": "assistant", "content": answer})
            planned = None


async def _until(moment: float) -> None:
    if (wait := moment - time.perf_counter()) > 0:
        await asyncio.sleep(wait)
