"""Work in Python that grows with a body."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

MANY = 250
"""Messages, prompts: what takes a few µs each."""


async def aside(count: int, work: Callable[[], T]) -> T:
    """`work()`, which goes over `count` items: in a thread where they are many, so that the loop has the GIL
    back after a switch interval."""
    return work() if count <= MANY else await asyncio.to_thread(work)
