"""Clients that go away, and requests that are ended."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from random import Random
from typing import Any

from bench.chaos.bench import Bench
from bench.chaos.clients import CHAT, NATIVE, TEXT, post, request, reset
from bench.chaos.row import Found
from bench.chaos.server import LOOK

STEPS = 100
"""That may be made for the dead after the last has died: those in flight, and those until the loop reads
that a connection has ended. Their requests would go on for 800."""


async def killed(bench: Bench) -> Found:
    """Clients die in their headers, bodies, in the queue, in prefill and in the stream."""
    found, count = Found(), bench.count(1_000, 40)
    gate = asyncio.Semaphore(16)

    async def victim() -> None:
        async with gate:
            await _leave_early(bench)

    async def attack() -> None:
        await asyncio.gather(*(victim() for _ in range(count)))
        died = await bench.server.tell("progress")
        now = died
        while now["running"] + now["waiting"] > 1 and now["steps"] - died["steps"] < 4 * STEPS:
            await asyncio.sleep(LOOK / 10)
            now = await bench.server.tell("progress")
        found.figures |= {"killed": count, "steps_after": now["steps"] - died["steps"]}
        found.expect(now["steps"] - died["steps"] <= STEPS, "requests of dead clients go on")

    await bench.beside(found, attack())
    return found


async def _leave_early(bench: Bench) -> None:
    """One victim: cut anywhere, ended in an orderly way or by a reset."""
    rng = bench.rng
    body: dict[str, Any] = {"prompt": "v" * rng.choice([5, 900]), "max_tokens": 800, "ignore_eos": True}
    data = request("POST", TEXT, {**body, "stream": rng.random() < 0.6, "n": rng.choice([1, 3])})
    reader, writer = await asyncio.open_connection("127.0.0.1", bench.port)
    cut = rng.choice([rng.randrange(1, len(data)), len(data), len(data)])
    writer.write(data[:cut])
    with suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(rng.random() * 0.1):
            await reader.read(rng.randrange(1, 2000))
    if rng.random() < 0.5:
        reset(writer)
    else:
        writer.transport.abort()


async def storm(bench: Bench) -> Found:
    """Requests with shared prefixes, half of them constrained, are started and ended at random; the tree is
    checked all along."""
    found, count = Found(), bench.count(10_000, 100)
    gate, rng = asyncio.Semaphore(64), bench.rng
    ended = 0

    async def one(index: int) -> None:
        nonlocal ended
        path, body = _stormy(rng)
        rid = f"storm-{index}"
        wait = rng.random() * 0.02
        async with gate:
            asked = asyncio.create_task(post(bench.port, path, {**body, "rid": rid}))
            await asyncio.sleep(wait)
            if rng.random() < 0.5:
                await post(bench.port, "/abort_request", {"rid": rid})
                ended += (await asked).status > 0
            else:
                asked.cancel()
                with suppress(asyncio.CancelledError):
                    await asked
        if index % 50 == 0:
            books = await bench.server.tell("books")
            found.expect(not books["integrity"], f"after {index}: {books['integrity']}")

    await asyncio.gather(*(one(index) for index in range(count)))
    found.figures |= {"requests": count, "answered": ended}
    found.expect(await bench.server.settled(), "requests are left that nothing moves")
    return found


def _stormy(rng: Random) -> tuple[str, dict[str, Any]]:
    """Route and body of one request. Some grammars are new, so that aborts meet a compiler at work."""
    first, rest = chr(65 + rng.randrange(3)) * rng.randrange(1, 60), chr(70 + rng.randrange(20))
    prompt = first + rest * rng.randrange(60)
    n = rng.choice([1, 1, 3])
    chat = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 200, "n": n}
    text = {"prompt": prompt, "max_tokens": 200, "n": n}
    schema = {"type": "object", "properties": {f"k{rng.randrange(40)}": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    match rng.randrange(8):
        case 0:
            return TEXT, {**text, "regex": f"[a-z]{{50,{100 + rng.randrange(40)}}}"}
        case 1:
            return TEXT, {**text, "structured_outputs": {"json": schema}}
        case 2:
            wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
            return CHAT, {**chat, "response_format": wanted}
        case 3:
            return CHAT, {**chat, "tools": [tool], "tool_choice": "required"}
    sampling = {"max_new_tokens": 200, "ignore_eos": True, "n": n}
    return NATIVE, {"input_ids": list(prompt.encode()), "sampling_params": sampling}
