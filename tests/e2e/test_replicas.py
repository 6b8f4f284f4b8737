"""Two replicas in one process, behind one port."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import aiohttp

from bench.chaos.tiny import flags
from tests.rigs.metrics import samples
from tests.rigs.process import Process, read_events, run_to_end, serving
from tests.rigs.sockets import LOCALHOST, listening
from tests.rigs.wait import PATIENCE

LONG = {"prompt": "x" * 50, "max_tokens": 1500, "ignore_eos": True, "stream": True}
WHOLE = {**LONG, "max_tokens": 600}
"""A request that runs to its end, which takes 2 ms a token. It must still run when the server drains."""
PROMPTS = [f"{number} sheep " * (number + 1) for number in range(8)]
DP = ("--dp", "2", "--load-balance-method", "round_robin", "--control-routes")


async def complete(session: aiohttp.ClientSession, server: Process, **headers: str) -> list[str]:
    """The texts of all prompts, drawn with seeds, side by side."""

    async def one(number: int, prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": 24, "ignore_eos": True, "seed": number, "temperature": 0.8}
        async with session.post(f"{server.url}/v1/completions", json=body, headers=headers) as answer:
            return str((await answer.json())["choices"][0]["text"])

    return await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(PROMPTS)))


async def by_replica(session: aiohttp.ClientSession, server: Process, name: str) -> list[float]:
    async with session.get(f"{server.url}/metrics") as answer:
        found = samples(await answer.text())
    sums = [0.0, 0.0]
    for (own, labels), value in found.items():
        if own == name:
            sums[int(dict(labels)["engine"])] += value
    return sums


async def test_two_replicas_answer_as_one_does_and_drain(
    shared: Process, model: Path, session: aiohttp.ClientSession
) -> None:
    await shared.ready(session)
    expected = await complete(session, shared)
    with serving(*flags(model), *DP) as server:
        await server.ready(session)
        assert listening(server.process.pid) == [LOCALHOST]
        assert await complete(session, server) == expected
        assert await by_replica(session, server, "loom_requests_finished_total") == [4, 4]
        for replica in ("0", "1"):
            assert await complete(session, server, **{"X-data-parallel-rank": replica}) == expected
        assert await by_replica(session, server, "loom_requests_finished_total") == [12, 12]

        # Memory of both is released and comes back, and weights are read again.
        async with session.post(f"{server.url}/sleep") as answer:
            assert answer.status == 200
        async with session.post(f"{server.url}/wake_up") as answer:
            assert answer.status == 200
        body = {"model_path": str(model)}
        async with session.post(f"{server.url}/update_weights_from_disk", json=body) as answer:
            assert answer.status == 200
        assert await by_replica(session, server, "loom_cache_pages_cached") == [0, 0]
        assert await complete(session, server) == expected

        # After SIGTERM running requests of both finish.
        running: list[Any] = []
        for _ in range(2):
            running.append(await session.post(f"{server.url}/v1/completions", json=WHOLE))
            await running[-1].content.readany()
        assert await by_replica(session, server, "loom_requests_running") == [1, 1]
        server.signal(signal.SIGTERM)
        for stream in running:
            events = await read_events(stream)
            assert events[-1] == "[DONE]"
            assert events[-2]["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0


async def test_a_second_signal_ends_the_requests_of_both(model: Path, session: aiohttp.ClientSession) -> None:
    with serving(*flags(model), *DP) as server:
        await server.ready(session)
        running: list[Any] = []
        for _ in range(2):
            running.append(await session.post(f"{server.url}/v1/completions", json=LONG))
            await running[-1].content.readany()
        server.signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE):
            while True:
                async with session.get(f"{server.url}/health") as health:
                    if health.status == 503:
                        break
        server.signal(signal.SIGTERM)
        for stream in running:
            events = await read_events(stream)
            assert "shutting down" in events[-2]["error"]["message"] and events[-1] == "[DONE]"
        assert server.wait() == 0


def test_a_count_that_cannot_be_is_one_line_of_error(model: Path) -> None:
    for flag, value in (("--dp", "0"), ("--data-parallel-size", "two"), ("--gpu-id-step", "-1")):
        ended = run_to_end(*flags(model), flag, value)
        assert ended.returncode == 2
        assert flag in ended.stderr.strip().splitlines()[-1] and "Traceback" not in ended.stderr
