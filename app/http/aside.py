"""Work in Python that grows with a body."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

MANY = 250
"""Messages, prompts: what takes a few µs each."""


IDS = 64
"""Token ids that take as long: a list of 390,000 is two slices of 5 ms, which a thread keeps apart."""


def prompt_count(prompts: object) -> int:
    """What a field that takes one prompt or many counts for: prompts, or `IDS` token ids."""
    if not isinstance(prompts, list):
        return 1
    lists = [prompts] if prompts and isinstance(prompts[0], int) else prompts
    return sum(1 + len(each) // IDS if isinstance(each, list) else 1 for each in lists)


async def aside(count: int, work: Callable[[], T]) -> T:
    """`work()`, which goes over `count` items: in a thread where they are many, so that the loop has the GIL
    back after a switch interval."""
    return work() if count <= MANY else await asyncio.to_thread(work)
