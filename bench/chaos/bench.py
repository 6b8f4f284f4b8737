"""Runs rows: the server that each wants, its books before and after, its seeded fault."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import Any

from bench.chaos.clients import TEXT, post
from bench.chaos.neighbour import Neighbour
from bench.chaos.row import Found, Row, Setting
from bench.chaos.server import LOOK, Server

PROMPTS = 20
AT_ONCE = 4
"""Of these: queues may be short."""
GROWTH = 50 * 2**20
"""Bytes of memory that may be left behind."""
GAP = 1.1, 0.020
"""A neighbour's p99 may grow to so much of it, or by so many seconds, whichever is more."""
ALONE = 3.0
"""Seconds in which a neighbour is heard alone, at full scale."""


@dataclass(frozen=True)
class Before:
    """What must be the same after a row."""

    texts: list[str]
    books: dict[str, Any]
    memory: int
    starts: int


class Unseeded(Exception):
    """A fault that the server did not take: nothing can be said of the row."""


class Bench:
    """What a row holds."""

    def __init__(self, server: Server, scale: float, soak: float, broken: bool) -> None:
        self.server = server
        self.scale = scale
        self.soak = soak
        """Minutes."""
        self.broken = broken
        self.rng = random.Random(17)
        self._row: Row | None = None

    @property
    def port(self) -> int:
        """Of the server that runs."""
        return self.server.port

    @property
    def timed(self) -> bool:
        """Whether times are judged: below full scale, on whatever machine, only counts are."""
        return self.scale >= 1

    def count(self, full: int, least: int = 1) -> int:
        """So many at this scale."""
        return max(round(full * self.scale), least)

    async def run(self, row: Row) -> Found:
        """One row, with the books checked around it."""
        self._row = row
        await self.serve(row.setting)
        found, grown = await self._once(row)
        if grown >= GROWTH:
            # Allocators keep what a peak took. What the server keeps grows again.
            again, grown = await self._once(row)
            found.wrong += again.wrong
            found.figures["growth_mb"] = [found.figures["growth_mb"], again.figures["growth_mb"]]
        found.expect(grown < GROWTH, f"memory grew by {grown / 2**20:.0f} MB")
        if self.broken:
            await self.server.stop()
        return found

    async def _once(self, row: Row) -> tuple[Found, int]:
        """What it found, and by how many bytes memory grew."""
        self.rng = random.Random(17)
        before = await self._before()
        await self.seed()
        begun = time.monotonic()
        found = await row.run(self)
        found.figures["seconds"] = round(time.monotonic() - begun, 1)
        await self._compare(before, found)
        if self.server.starts != before.starts:
            return found, 0  # another server has other memory
        grown = await self._memory() - before.memory
        found.figures["growth_mb"] = round(grown / 2**20, 1)
        return found, grown

    async def serve(self, setting: Setting) -> None:
        """A server with this setting, the one that runs if it is so."""
        if self.server.setting != setting:
            await self.server.stop()
        if not self.server.alive:
            await self.server.start(setting)

    async def restart(self) -> None:
        """Another server in place of the one that has ended, or ends now."""
        assert self.server.setting is not None
        await self.server.stop()
        await self.server.start(self.server.setting)
        await self.seed()

    async def seed(self) -> None:
        """Put the row's fault into the server, if that is asked."""
        if self.broken and self._row is not None:
            try:
                await self.server.tell("fault", name=self._row.seed)
            except RuntimeError as error:
                raise Unseeded(f"{self._row.name}: {self._row.seed!r} cannot be seeded: {error}") from error

    async def beside(self, found: Found, attack: Any) -> None:
        """Run `attack` with valid traffic beside it, which must not notice."""
        with Neighbour(self.port) as alone:
            await asyncio.sleep(ALONE * min(self.scale, 1))
        with Neighbour(self.port) as neighbour:
            await attack
        was, now = alone.seen["p99"], neighbour.seen["p99"]
        found.figures["neighbour_p99_ms"] = [round(1e3 * was, 1), round(1e3 * now, 1)]
        found.figures["neighbour_streams"] = neighbour.seen["count"]
        found.expect(
            not self.timed or now <= max(GAP[0] * was, was + GAP[1]),
            f"a neighbour's p99 gap went from {1e3 * was:.1f} to {1e3 * now:.1f} ms",
        )
        texts = alone.seen["texts"]
        found.expect(
            len(texts) == 1 and neighbour.seen["texts"] == texts and not texts[0].startswith("broken"),
            f"a neighbour's text changed: {texts} and {neighbour.seen['texts']}"[:500],
        )

    # -- the books ---------------------------------------------------------------------------------

    async def texts(self) -> list[str]:
        """The greedy continuations of some prompts."""
        bodies = [
            {
                "prompt": f"{i} is a number " * (1 + i % 4),
                "max_tokens": 24,
                "temperature": 0,
                "ignore_eos": True,
            }
            for i in range(PROMPTS)
        ]
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(body: dict[str, Any]) -> str:
            async with gate:
                return (await post(self.port, TEXT, body)).text

        return await asyncio.gather(*(one(body) for body in bodies))

    async def _before(self) -> Before:
        texts = await self.texts()
        return Before(texts, await self.at_rest(), await self._memory(), self.server.starts)

    async def _memory(self) -> int:
        """Bytes, without what is cached: that has a bound of its own."""
        await post(self.port, "/flush_cache", {})
        return int((await self.server.tell("books"))["rss"])

    async def at_rest(self) -> dict[str, Any]:
        """The books once nothing runs and every client has been seen off, or as they stay."""
        for _ in range(100):
            settled = await self.server.settled()
            books = await self.server.tell("books")
            if not settled or not (books["jobs"] or books["connections"] or books["in_flight"]):
                break
            await asyncio.sleep(LOOK)
        return books

    async def _compare(self, before: Before, found: Found) -> None:
        """Everything as before, or wrong."""
        if not self.server.alive or await self.server.health() != 200:
            await self.restart()
        books = await self.at_rest()
        now, was = books, before.books
        found.expect(not now["failure"], f"the engine failed: {now['failure']}")
        found.expect(now["free"] + now["cached"] == now["pages"], "pages are neither free nor cached")
        found.expect(not now["protected"], f"{now['protected']} pages are locked without a holder")
        found.expect(not now["integrity"], now["integrity"])
        for what in ("jobs", "connections", "running", "waiting"):
            found.expect(not now[what], f"{now[what]} {what} are left")
        left = [task for task in now["tasks"] if now["tasks"].count(task) > was["tasks"].count(task)]
        found.expect(not left, f"tasks are left: {left[:5]}")
        found.expect(await self.texts() == before.texts, "greedy texts are not what they were")
