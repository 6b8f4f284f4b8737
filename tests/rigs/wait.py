"""How tests wait: the bound of every wait, for a condition, for callbacks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PATIENCE = 120.0
"""Seconds. A bound for a failing test and never a promise: on a busy machine torch alone takes ten of them to
import, and a bound of 20 has failed a test in which nothing was wrong."""


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until `condition` holds. The bound is for a failing test only."""
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.001)


async def settle() -> None:
    """Let every callback that is due run."""
    for _ in range(50):
        await asyncio.sleep(0)
