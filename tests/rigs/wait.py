"""Helpers that wait in tests for a condition or a callback, with one common timeout."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PATIENCE = 120.0
"""Timeout in seconds, reached only by failing tests. It is long because on a busy machine the import of torch
alone takes 10 s."""


async def until(condition: Callable[[], bool]) -> None:
    """Run the event loop until `condition` holds."""
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.001)


async def settle() -> None:
    """Run all callbacks that are due."""
    for _ in range(50):
        await asyncio.sleep(0)
