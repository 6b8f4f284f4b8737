"""Hostile clients against a real server. `bench.chaos` has more; these tests need other settings or check
the answers in detail."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from bench.chaos.row import Setting
from bench.chaos.server import Server
from tests.rigs.process import Process
from tests.rigs.wait import PATIENCE

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
GOOD = {"prompt": "The neighbours sing", "max_tokens": 60, "ignore_eos": True, "temperature": 0}


@pytest.fixture
async def url(shared: Process, session: aiohttp.ClientSession) -> str:
    await shared.ready(session)
    return shared.url


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE), connector=connector) as opened:
        yield opened


async def send(session: aiohttp.ClientSession, url: str, path: str, body: Any) -> tuple[int, bytes]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with session.post(url + path, data=io.BytesIO(data)) as answer:
        return answer.status, await answer.read()


async def tokens(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> list[list[int]]:
    status, answer = await send(session, url, TEXT, {**body, "return_token_ids": True})
    assert status == 200, answer
    return [choice["token_ids"] for choice in json.loads(answer)["choices"]]


async def figures(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    async with session.get(url + "/metrics") as answer:
        lines = [line for line in (await answer.text()).splitlines() if line.startswith("loom_")]
    return {line.split("{")[0].split(" ")[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


async def wait_idle(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Wait until nothing runs; every page must be free or cached then. Returns the metrics."""
    async with asyncio.timeout(PATIENCE):
        while True:
            now = await figures(session, url)
            if not now["loom_requests_running"] and not now["loom_requests_waiting"]:
                break
            await asyncio.sleep(0.05)  # polling without a pause would take CPU time from the server
    assert now["loom_cache_pages_free"] + now["loom_cache_pages_cached"] == now["loom_cache_pages"]
    assert now["loom_cache_pages_protected"] == 0
    return now


LARGE_POOL = ()
SMALL_POOL = ("--kv-tokens", "320", "--conservativeness", "0.01", "--prefill-weight", "0")
SETTINGS = (
    LARGE_POOL,
    SMALL_POOL,
    (*SMALL_POOL, "--overlap-depth", "2", "--page-size", "1", "--no-radix-cache"),
    ("--overlap-depth", "0", "--step-tokens", "16"),
    ("--prefill-first", "--max-running", "3"),
)


async def test_tokens_do_not_depend_on_settings_or_concurrency(session: aiohttp.ClientSession) -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": f"{i} is a number " * (1 + i % 3), "max_tokens": 70, "ignore_eos": True, "seed": 5}
        | ({"temperature": 0} if i % 2 else {"temperature": 1, "n": 1 + i % 3})
        | ({"presence_penalty": 1.0, "repetition_penalty": 1.3} if i % 4 == 0 else {})
        for i in range(12)
    ]
    expected: list[list[list[int]]] = []
    server = Server(model="")  # one process in which the servers run one after another
    try:
        for setting in SETTINGS:
            await server.stop()
            await server.start(Setting(flags=setting))
            url = f"http://127.0.0.1:{server.port}"
            expected = expected or [await tokens(session, url, body) for body in bodies]
            concurrent = await asyncio.gather(*(tokens(session, url, body) for body in bodies))
            assert concurrent == expected, setting
            now = await wait_idle(session, url)
            assert (now["loom_retractions_total"] > 0) == (setting[: len(SMALL_POOL)] == SMALL_POOL), setting
    finally:
        await server.close()


WIDE = [[1]] * 100_001
EXPENSIVE: list[tuple[str, dict[str, Any], str]] = [
    ("/tokenize", {"prompt": ["a"] * 2049}, "prompt"),
    ("/detokenize", {"tokens": [[1]] * 2049}, "tokens"),
    (TEXT, {"prompt": "a", "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    (TEXT, {"prompt": "a", "stop_regex": ["(.{0,30}[a-z]){0,9}q"]}, "stop_regex"),
    (CHAT, {"messages": [{"role": "user", "content": "a"}] * 100_001}, "messages"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": WIDE}},
        "chat_template_kwargs",
    ),
]


async def test_bodies_that_would_block_the_event_loop_are_rejected(
    url: str, session: aiohttp.ClientSession
) -> None:
    for path, body, param in EXPENSIVE:
        status, answer = await send(session, url, path, body)
        assert (status, json.loads(answer)["error"]["param"]) == (400, param)


async def test_cumulative_events_are_not_quadratic_in_the_output(
    url: str, session: aiohttp.ClientSession
) -> None:
    sampling = {"max_new_tokens": 800, "ignore_eos": True, "temperature": 0}
    body = {"text": "a", "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 20}
    status, stream = await send(session, url, NATIVE, {**body, "stream": True})
    events = [line for line in stream.split(b"\n\n") if line.startswith(b"data: {")]
    assert status == 200 and len(json.loads(events[-1][6:])["output_ids"]) == 800
    assert len(stream) < 40 * len(events[-1])  # 400 times the last event if quadratic


async def test_the_cache_can_be_flushed_after_the_last_answer(
    url: str, session: aiohttp.ClientSession
) -> None:
    """Also after a request that ends with a stop token, which leaves a planned step in flight."""
    [ids] = await tokens(session, url, {**GOOD, "temperature": 1, "seed": 1})
    for _ in range(10):
        await tokens(session, url, {**GOOD, "temperature": 1, "seed": 1, "stop_token_ids": [ids[3]]})
        status, answer = await send(session, url, "/flush_cache", {})
        assert status == 200, answer
