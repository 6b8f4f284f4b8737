"""Runs rows: starts the server of each, injects its fault, checks the accounting before and after."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import Any

from bench.chaos.clients import TEXT, post
from bench.chaos.neighbour import Neighbour
from bench.chaos.row import Outcome, Row, Setting
from bench.chaos.server import POLL_INTERVAL, Server

PROMPTS = 20
"""Greedy outputs compared at full scale; 4 at least."""
CONCURRENCY = 4
"""Requests at a time: the queue of some servers is short."""
GROWTH = 50 * 2**20
"""Bytes by which memory may grow in a row."""
GAP = 1.1, 0.020
"""The neighbour's p99 gap may grow by this factor, or by this many seconds, whichever is more."""
ALONE = 3.0
"""Seconds of the neighbour's baseline without the attack, at full scale."""


@dataclass(frozen=True)
class Baseline:
    """State before a row, to compare with afterwards."""

    texts: list[str]
    accounting: dict[str, Any]
    memory: int
    starts: int


class InjectionFailed(Exception):
    """The fault could not be injected into the server, so the row has no verdict."""


class Bench:
    """The server under test, and what rows share: scale, random numbers, checks."""

    def __init__(self, server: Server, scale: float, soak: float, inject_fault: bool) -> None:
        self.server = server
        self.scale = scale
        self.soak = soak
        """Duration of the soak in minutes."""
        self.inject_fault = inject_fault
        self.rng = random.Random(17)
        self._row: Row | None = None

    @property
    def port(self) -> int:
        """Port of the running server."""
        return self.server.port

    @property
    def timed(self) -> bool:
        """Whether limits on times apply: below full scale only counts are checked."""
        return self.scale >= 1

    def count(self, full: int, minimum: int = 1) -> int:
        """`full` times the scale, at least `minimum`."""
        return max(round(full * self.scale), minimum)

    async def run(self, row: Row) -> Outcome:
        """Run one row and check the accounting afterwards."""
        self._row = row
        await self.serve(row.setting)
        outcome, grown = await self._once(row)
        if grown >= GROWTH and not (self.inject_fault and outcome.violations):
            # Allocators keep the memory of a peak. A leak in the server grows again in a second run.
            again, grown = await self._once(row)
            outcome.violations += again.violations
            outcome.figures["growth_mb"] = [outcome.figures["growth_mb"], again.figures["growth_mb"]]
        outcome.expect(grown < GROWTH, f"memory grew by {grown / 2**20:.0f} MB")
        if self.inject_fault:
            await self.server.stop()
        return outcome

    async def _once(self, row: Row) -> tuple[Outcome, int]:
        """The outcome of a row, and the bytes by which memory grew."""
        self.rng = random.Random(17)
        before = await self._baseline()
        await self.inject()
        begun = time.monotonic()
        outcome = await row.run(self)
        outcome.figures["seconds"] = round(time.monotonic() - begun, 1)
        if self.inject_fault and outcome.violations:
            return outcome, 0  # detected: waiting for all that the fault has left would tell nothing more
        await self._compare(before, outcome)
        if self.server.starts != before.starts:
            return outcome, 0  # the server was restarted: its memory cannot be compared
        grown = await self._memory() - before.memory
        outcome.figures["growth_mb"] = round(grown / 2**20, 1)
        return outcome, grown

    async def serve(self, setting: Setting) -> None:
        """Start a server with this setting, unless one is running."""
        if self.server.setting != setting:
            await self.server.stop()
        if not self.server.alive:
            await self.server.start(setting)

    async def restart(self) -> None:
        """Stop the server if it runs, and start another."""
        assert self.server.setting is not None
        await self.server.stop()
        await self.server.start(self.server.setting)
        await self.inject()

    async def inject(self) -> None:
        """Inject the row's fault into the server, with `--break`."""
        if self.inject_fault and self._row is not None:
            try:
                await self.server.call("inject", name=self._row.fault)
            except RuntimeError as error:
                raise InjectionFailed(
                    f"{self._row.name}: cannot inject {self._row.fault!r}: {error}"
                ) from error

    async def run_beside_neighbour(self, outcome: Outcome, attack: Any) -> None:
        """Run `attack` beside valid traffic, whose gaps and texts must stay as without it."""
        with Neighbour(self.port) as alone:
            await asyncio.sleep(ALONE * min(self.scale, 1))
        with Neighbour(self.port) as neighbour:
            await attack
        before, after = alone.seen["p99"], neighbour.seen["p99"]
        outcome.figures["neighbour_p99_ms"] = [round(1e3 * before, 1), round(1e3 * after, 1)]
        outcome.figures["neighbour_streams"] = neighbour.seen["count"]
        outcome.expect(
            not self.timed or after <= max(GAP[0] * before, before + GAP[1]),
            f"the neighbour's p99 gap grew from {1e3 * before:.1f} to {1e3 * after:.1f} ms",
        )
        texts = alone.seen["texts"]
        outcome.expect(
            len(texts) == 1 and neighbour.seen["texts"] == texts and not texts[0].startswith("broken"),
            f"the neighbour's text changed: {texts} and {neighbour.seen['texts']}"[:500],
        )

    # -- checks ------------------------------------------------------------------------------------

    async def texts(self) -> list[str]:
        """Greedy outputs of a fixed set of prompts."""
        bodies = [
            {
                "prompt": f"{i} is a number " * (1 + i % 4),
                "max_tokens": 24,
                "temperature": 0,
                "ignore_eos": True,
            }
            for i in range(min(self.count(PROMPTS, minimum=4), PROMPTS))
        ]
        gate = asyncio.Semaphore(CONCURRENCY)

        async def one(body: dict[str, Any]) -> str:
            async with gate:
                return (await post(self.port, TEXT, body)).text

        return await asyncio.gather(*(one(body) for body in bodies))

    async def _baseline(self) -> Baseline:
        texts = await self.texts()
        return Baseline(texts, await self.idle_accounting(), await self._memory(), self.server.starts)

    async def _memory(self) -> int:
        """Resident bytes after the prefix cache is flushed, which has its own limit."""
        await post(self.port, "/flush_cache", {})
        return int((await self.server.call("accounting"))["rss"])

    async def idle_accounting(self) -> dict[str, Any]:
        """The accounting once nothing runs and all connections are closed, or after 100 polls."""
        for _ in range(100):
            idle = await self.server.wait_idle()
            accounting = await self.server.call("accounting")
            if not idle or not (accounting["jobs"] or accounting["connections"] or accounting["in_flight"]):
                break
            await asyncio.sleep(POLL_INTERVAL)
        return accounting

    async def _compare(self, before: Baseline, outcome: Outcome) -> None:
        """Compare the server with `before`."""
        if not self.server.alive or await self.server.health() != 200:
            await self.restart()
        accounting = await self.idle_accounting()
        now = accounting
        outcome.expect(not now["failure"], f"the engine failed: {now['failure']}")
        outcome.expect(now["free"] + now["cached"] == now["pages"], "pages are neither free nor cached")
        outcome.expect(not now["protected"], f"{now['protected']} pages are locked, but no request runs")
        outcome.expect(not now["integrity"], now["integrity"])
        for what in ("jobs", "connections", "running", "waiting"):
            outcome.expect(not now[what], f"{now[what]} {what} are left")
        tasks = before.accounting["tasks"]
        left = [task for task in now["tasks"] if now["tasks"].count(task) > tasks.count(task)]
        outcome.expect(not left, f"tasks are left: {left[:5]}")
        outcome.expect(await self.texts() == before.texts, "greedy texts changed")
