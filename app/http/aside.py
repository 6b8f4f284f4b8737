"""Runs work in a thread where it grows with the size of a request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

MANY = 250
"""Items (messages, prompts) of a few µs each that are processed on the loop."""

IDS = 64
"""Token ids that take as long as one item: 390,000 are two slices of 5 ms in a thread."""


def prompt_count(prompts: object) -> int:
    """Items of a field with one prompt or many: one per prompt and one per `IDS` token ids."""
    if not isinstance(prompts, list):
        return 1
    lists = [prompts] if prompts and isinstance(prompts[0], int) else prompts
    return sum(1 + len(each) // IDS if isinstance(each, list) else 1 for each in lists)


async def aside(count: int, work: Callable[[], T]) -> T:
    """`work()`, which processes `count` items: in a thread if they are many, so that the loop gets the GIL
    back after a switch interval."""
    return work() if count <= MANY else await asyncio.to_thread(work)
