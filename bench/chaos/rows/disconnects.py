"""Disconnecting clients and aborted requests."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from random import Random
from typing import Any

from bench.chaos.bench import Bench
from bench.chaos.clients import CHAT, NATIVE, TEXT, post, request, reset
from bench.chaos.row import Outcome
from bench.chaos.server import POLL_INTERVAL

STEPS = 100
"""Steps that may still run for disconnected clients: those in flight, and those until the event loop reads
that a connection has ended. Without aborts the requests would run for 300 at least."""


async def killed(bench: Bench) -> Outcome:
    """Clients disconnect within headers or bodies, in the queue, in prefill and in the stream."""
    outcome, count = Outcome(), bench.count(1_000, 40)
    gate = asyncio.Semaphore(16)

    async def client() -> None:
        async with gate:
            await _disconnect_early(bench)

    async def attack() -> None:
        await asyncio.gather(*(client() for _ in range(count)))
        before = await bench.server.call("progress")
        now = before
        while now["running"] + now["waiting"] > 1 and now["steps"] - before["steps"] <= STEPS:
            await asyncio.sleep(POLL_INTERVAL / 10)
            now = await bench.server.call("progress")
        outcome.figures |= {"killed": count, "steps_after": now["steps"] - before["steps"]}
        outcome.expect(now["steps"] - before["steps"] <= STEPS, "requests of disconnected clients still run")

    await bench.run_beside_neighbour(outcome, attack())
    return outcome


async def _disconnect_early(bench: Bench) -> None:
    """Run one client that disconnects at a random point, by a close or by a reset."""
    rng = bench.rng
    tokens = bench.count(800, 300)
    body: dict[str, Any] = {"prompt": "v" * rng.choice([5, 900]), "max_tokens": tokens, "ignore_eos": True}
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


async def storm(bench: Bench) -> Outcome:
    """Requests with shared prefixes, half of them constrained, are started and aborted at random; the
    integrity of the radix tree is checked meanwhile."""
    outcome, count = Outcome(), bench.count(10_000, 100)
    gate, rng = asyncio.Semaphore(64), bench.rng
    answered = 0

    async def one(index: int) -> None:
        nonlocal answered
        path, body = _random_request(rng)
        rid = f"storm-{index}"
        wait = rng.random() * 0.02
        async with gate:
            task = asyncio.create_task(post(bench.port, path, {**body, "rid": rid}))
            await asyncio.sleep(wait)
            if rng.random() < 0.5:
                await post(bench.port, "/abort_request", {"rid": rid})
                answered += (await task).status > 0
            else:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        if index % 50 == 0:
            accounting = await bench.server.call("accounting")
            outcome.expect(not accounting["integrity"], f"after {index}: {accounting['integrity']}")

    await asyncio.gather(*(one(index) for index in range(count)))
    outcome.figures |= {"requests": count, "answered": answered}
    outcome.expect(await bench.server.wait_idle(), "requests are stuck")
    return outcome


def _random_request(rng: Random) -> tuple[str, dict[str, Any]]:
    """Route and body of one request. Some grammars are new, so that some aborts come during compilation."""
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
            response_format = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
            return CHAT, {**chat, "response_format": response_format}
        case 3:
            return CHAT, {**chat, "tools": [tool], "tool_choice": "required"}
    sampling = {"max_new_tokens": 200, "ignore_eos": True, "n": n}
    return NATIVE, {"input_ids": list(prompt.encode()), "sampling_params": sampling}
