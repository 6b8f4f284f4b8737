"""Texts that a server answers to requests of several kinds."""

from __future__ import annotations

from typing import Any

import aiohttp

from tests.rigs.process import Process, read_events
from tests.rigs.wait import PATIENCE

BODIES: list[dict[str, Any]] = [
    {"prompt": "x" * 20, "max_tokens": 40, "temperature": 0, "ignore_eos": True},
    {"prompt": "x" * 150, "max_tokens": 30, "seed": 7, "ignore_eos": True, "stream": True},
    {"prompt": "a number", "max_tokens": 12, "temperature": 0, "regex": "[0-9]{8}"},
]


async def texts(server: Process) -> list[str]:
    """The texts of all bodies, once the server is ready."""
    found = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE)) as session:
        await server.ready(session)
        for body in BODIES:
            async with session.post(f"{server.url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                if body.get("stream"):
                    chunks = [event for event in await read_events(answer) if event != "[DONE]"]
                else:
                    chunks = [await answer.json()]
                found.append("".join(c["text"] for chunk in chunks for c in chunk["choices"]))
    return found
