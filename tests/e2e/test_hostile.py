"""Hostile clients against a real server: whatever one does, nobody else notices."""

from __future__ import annotations

import asyncio
import io
import json
import random
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.process import Process, dummy_model, flags, serving
from tests.patience import PATIENCE

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
GOOD = {"prompt": "The neighbours sing", "max_tokens": 60, "ignore_eos": True, "temperature": 0}

BODIES: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hé😀"}]}],
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "presence_penalty": 0.1,
        "logit_bias": {"5": 1.5},
        "seed": 3,
        "n": 2,
        "max_tokens": 4,
        "stop": ["zz"],
        "stop_regex": "a+b",
        "logprobs": True,
        "top_logprobs": 2,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "chat_template_kwargs": {"k": 1},
    },
    TEXT: {
        "prompt": "hello",
        "echo": True,
        "logprobs": 2,
        "max_tokens": 3,
        "min_tokens": 1,
        "stop_token_ids": [7],
        "stream": True,
        "stream_options": {"include_usage": True},
        "truncate_prompt_tokens": 3,
    },
    NATIVE: {
        "text": ["a", "b"],
        "sampling_params": {"max_new_tokens": 3, "n": 2, "min_p": 0.1, "sampling_seed": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
    },
    "/tokenize": {"prompt": "héllo", "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2, 299]},
    "/abort_request": {"rid": "nobody"},
}
VALUES: list[Any] = [
    *(None, True, 0, -1, 2, 129, 2**31, 2**63, -(2**63), 10**30, 0.5, 1e308, -1e308, 1e-320),
    *(float("nan"), float("inf"), "", "a", "x" * 3000, "\ud800", "\x00", "{{7*7}}", [], [None], [[]], [[1]]),
    *([300], [-1], ["a", 1], ["a"] * 70, ["(a+)+$", "\\"], {}, {"a": 1}, {"999": 1}, {"1": 1e308}),
    *([{"type": "image_url"}], [{"role": "user", "content": "x"}], {"type": "json_object"}),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dummy_model(tmp_path_factory.mktemp("hostile"))


@pytest.fixture(scope="module")
def started(model: Path) -> Iterator[Process]:
    with serving(*quiet(model)) as process:
        yield process


@pytest.fixture
async def server(started: Process, session: aiohttp.ClientSession) -> Process:
    await started.ready(session)
    return started


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE), connector=connector) as opened:
        yield opened


def quiet(model: Path) -> list[str]:
    """Nobody reads the server's log here, and a full pipe would stop it."""
    return [*flags(model), "--log-level", "warning"]


async def send(session: aiohttp.ClientSession, server: Process, path: str, body: Any) -> tuple[int, bytes]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with session.post(server.url + path, data=io.BytesIO(data)) as answer:
        return answer.status, await answer.read()


async def tokens(session: aiohttp.ClientSession, server: Process, body: dict[str, Any]) -> list[list[int]]:
    status, answer = await send(session, server, TEXT, {**body, "return_token_ids": True})
    assert status == 200, answer
    return [choice["token_ids"] for choice in json.loads(answer)["choices"]]


async def figures(session: aiohttp.ClientSession, server: Process) -> dict[str, float]:
    async with session.get(server.url + "/metrics") as answer:
        lines = [line for line in (await answer.text()).splitlines() if line.startswith("loom_")]
    return {line.split("{")[0].split(" ")[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


async def at_rest(session: aiohttp.ClientSession, server: Process) -> dict[str, float]:
    """The figures once nothing runs; every page must be free or cached then."""
    async with asyncio.timeout(PATIENCE):
        while True:
            now = await figures(session, server)
            if not now["loom_requests_running"] and not now["loom_requests_waiting"]:
                break
            await asyncio.sleep(0.05)  # asked without a pause, it shares a core with what it waits for
    assert now["loom_cache_pages_free"] + now["loom_cache_pages_cached"] == now["loom_cache_pages"]
    assert now["loom_cache_pages_protected"] == 0
    return now


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) inside a body."""
    for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(item, dict | list):
            yield from places(item)


def mutated(body: dict[str, Any], rng: random.Random) -> bytes:
    """A valid body with a few values replaced or dropped, or its bytes damaged."""
    body = json.loads(json.dumps(body))
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        container, key = rng.choice(list(places(body)) or [(body, "x")])
        if rng.random() < 0.85:
            container[key] = rng.choice(VALUES)
        elif key in container:
            del container[key]
    data = json.dumps(body).encode()
    damage, at = rng.random(), rng.randrange(len(data))
    if damage < 0.06:
        return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    return data[:at] if damage < 0.09 else data


async def test_damaged_bodies_get_4xx_and_neighbours_their_own_text(
    server: Process, session: aiohttp.ClientSession
) -> None:
    rng = random.Random(12)
    alone = await tokens(session, server, GOOD)
    wrong: list[object] = []
    seen: Counter[int] = Counter()
    gate, over = asyncio.Semaphore(8), False

    async def attack(path: str, data: bytes) -> None:
        async with gate:
            status, answer = await send(session, server, path, data)
        seen[status] += 1
        if status >= 500 or b"server_error" in answer:
            wrong.append((path, data, status, answer[-300:]))
        elif status >= 400 and set(json.loads(answer)["error"]) != {"message", "type", "param", "code"}:
            wrong.append((path, data, answer))

    async def neighbour() -> None:
        while not over:
            if await tokens(session, server, GOOD) != alone:
                wrong.append("a neighbour's text changed")

    neighbours = [asyncio.create_task(neighbour()) for _ in range(2)]
    attacks = [(path, mutated(body, rng)) for path, body in BODIES.items() for _ in range(60)]
    rng.shuffle(attacks)
    await asyncio.gather(*(attack(*one) for one in attacks))
    over = True
    await asyncio.gather(*neighbours)
    assert not wrong
    assert set(seen) == {200, 400, 404} and min(seen[200], seen[400]) > 50
    assert await tokens(session, server, GOOD) == alone
    await at_rest(session, server)


async def leave_early(server: Process, rng: random.Random) -> None:
    """A client that dies in its headers, its body, the queue, the prefill or the stream."""
    body: dict[str, Any] = {"prompt": "v" * rng.choice([5, 900]), "max_tokens": 800, "ignore_eos": True}
    data = json.dumps({**body, "stream": rng.random() < 0.6, "n": rng.choice([1, 3])}).encode()
    request = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (TEXT.encode(), len(data)) + data
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    cut = rng.choice([rng.randrange(1, len(request)), len(request), len(request)])
    writer.write(request[:cut])
    if cut == len(request):
        with suppress(TimeoutError):
            async with asyncio.timeout(rng.random() * 0.3):
                await reader.read(rng.randrange(1, 2000))
    if rng.random() < 0.5:  # a reset instead of an orderly end
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


async def test_killed_clients_leave_nothing_behind(server: Process, session: aiohttp.ClientSession) -> None:
    rng = random.Random(7)
    alone = await tokens(session, server, GOOD)
    gate = asyncio.Semaphore(16)

    async def victim() -> None:
        async with gate:
            await leave_early(server, rng)

    results = await asyncio.gather(tokens(session, server, GOOD), *(victim() for _ in range(80)))
    assert results[0] == alone
    await at_rest(session, server)
    assert await tokens(session, server, GOOD) == alone


async def test_a_reader_that_sleeps_hinders_nobody_and_loses_nothing(
    server: Process, session: aiohttp.ClientSession
) -> None:
    body = {**GOOD, "max_tokens": 1500, "stream": True, "logprobs": 5}

    def text(stream: bytes) -> str:
        events = [json.loads(line[6:]) for line in stream.split(b"\n\n") if line.startswith(b"data: {")]
        return "".join(choice["text"] for event in events for choice in event["choices"])

    _, whole = await send(session, server, TEXT, body)
    loop, data = asyncio.get_running_loop(), json.dumps(body).encode()
    with socket.socket() as sleeper:
        sleeper.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sleeper.setblocking(False)
        await loop.sock_connect(sleeper, ("127.0.0.1", server.port))
        # HTTP/1.0 with keep-alive too: without chunks only the end of the connection ends a stream.
        head = b"POST %b HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: %d\r\n\r\n"
        await loop.sock_sendall(sleeper, head % (TEXT.encode(), len(data)) + data)
        short = {**GOOD, "max_tokens": 40, "stream": True}
        others = await asyncio.gather(*(send(session, server, TEXT, short) for _ in range(50)))
        assert all(status == 200 and stream.endswith(b"data: [DONE]\n\n") for status, stream in others)
        await at_rest(session, server)
        received = b""
        async with asyncio.timeout(PATIENCE):
            while part := await loop.sock_recv(sleeper, 65536):
                received += part
    assert received.endswith(b"data: [DONE]\n\n")
    assert text(received.partition(b"\r\n\r\n")[2]) == text(whole)


async def test_overload_is_refused_at_once_and_the_accepted_finish(
    model: Path, session: aiohttp.ClientSession
) -> None:
    with serving(*quiet(model), "--max-queued", "4", "--max-running", "2") as server:
        await server.ready(session)
        statuses: Counter[int] = Counter()

        async def one() -> None:
            async with session.post(server.url + TEXT, json=GOOD) as answer:
                statuses[answer.status] += 1
                body = await answer.json()
                if answer.status == 429:
                    assert body["error"]["code"] == "rate_limit_exceeded"
                    assert {"retry-after", "retry-after-ms"} <= {name.lower() for name in answer.headers}
                else:
                    assert body["usage"]["completion_tokens"] == GOOD["max_tokens"]

        await asyncio.gather(*(one() for _ in range(60)))
        assert set(statuses) == {200, 429} and statuses[200] >= 4
        await at_rest(session, server)


ROOMY: list[str] = []
TIGHT = ["--kv-tokens", "320", "--conservativeness", "0.01"]
SETTINGS = [
    ROOMY,
    TIGHT,
    [*TIGHT, "--overlap-depth", "2", "--page-size", "1", "--no-radix-cache"],
    ["--overlap-depth", "0", "--step-tokens", "16"],
    ["--prefill-first", "--max-running", "3"],
]


async def test_the_same_tokens_in_every_setting_alone_and_in_a_crowd(
    model: Path, session: aiohttp.ClientSession
) -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": f"{i} is a number " * (1 + i % 3), "max_tokens": 70, "ignore_eos": True, "seed": 5}
        | ({"temperature": 0} if i % 2 else {"temperature": 1, "n": 1 + i % 3})
        | ({"presence_penalty": 1.0, "repetition_penalty": 1.3} if i % 4 == 0 else {})
        for i in range(12)
    ]
    expected: list[list[list[int]]] = []
    for setting in SETTINGS:
        with serving(*quiet(model), *setting) as server:
            await server.ready(session)
            expected = expected or [await tokens(session, server, body) for body in bodies]
            crowd = await asyncio.gather(*(tokens(session, server, body) for body in bodies))
            assert crowd == expected, setting
            now = await at_rest(session, server)
            assert (now["loom_retractions_total"] > 0) == (setting[:4] == TIGHT), setting


def post(head: str = "", body: bytes = json.dumps(GOOD).encode(), length: bool = True) -> bytes:
    framing = f"Content-Length: {len(body)}\r\n" if length else ""
    return f"POST {TEXT} HTTP/1.1\r\nHost: x\r\n{framing}{head}\r\n".encode() + body


CHUNKED = b"".join(b"1\r\n%c\r\n" % byte for byte in json.dumps(GOOD).encode()) + b"0\r\n\r\n"
END = "Connection: close\r\n"
WIRE: list[tuple[bytes, int]] = [
    (post(END + "Transfer-Encoding: chunked\r\n", CHUNKED, False), 200),
    (post(END + "Transfer-Encoding: gzip, chunked\r\n", CHUNKED, False), 415),
    (post(END + "Content-Encoding: gzip\r\n"), 415),
    (post(END + "Content-Length: 999999999999\r\n", b"", False), 413),
    (post("Transfer-Encoding: chunked\r\n", b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n"), 400),
    (post("Content-Length: 5\r\n"), 400),
    (post("Content-Length: -1\r\n", b"", False), 400),
    (post("X: " + "a" * 65536 + "\r\n"), 431),
    (b"FOO /health HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    (b"\x16\x03\x01\x00\xf8" + b"a" * 100, 400),
    (b"GET http://x/health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 200),
    (b"HEAD /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 200),
    (b"GET /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 405),
    (b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404),
]


async def test_what_is_hardly_http_gets_a_sane_status_and_the_nested_error(server: Process) -> None:
    for request, status in WIRE:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request)
        async with asyncio.timeout(PATIENCE):
            answer = await reader.read()
        writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        assert int(head.split()[1]) == status, (request[:200], answer[:300])
        if status >= 400:
            assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}, request[:200]


WIDE = [[1]] * 100_001
COSTLY: list[tuple[str, dict[str, Any], str]] = [
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


async def test_bodies_that_would_hold_the_loop_are_refused(
    server: Process, session: aiohttp.ClientSession
) -> None:
    for path, body, param in COSTLY:
        status, answer = await send(session, server, path, body)
        assert (status, json.loads(answer)["error"]["param"]) == (400, param)


async def test_cumulative_events_do_not_grow_with_the_square_of_the_output(
    server: Process, session: aiohttp.ClientSession
) -> None:
    sampling = {"max_new_tokens": 800, "ignore_eos": True, "temperature": 0}
    body = {"text": "a", "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 20}
    status, stream = await send(session, server, NATIVE, {**body, "stream": True})
    events = [line for line in stream.split(b"\n\n") if line.startswith(b"data: {")]
    assert status == 200 and len(json.loads(events[-1][6:])["output_ids"]) == 800
    assert len(stream) < 40 * len(events[-1])  # 400 times the last event before


async def test_the_cache_can_be_flushed_after_the_last_answer(
    server: Process, session: aiohttp.ClientSession
) -> None:
    """Also when the request left a planned step behind, as one that ends with a stop does."""
    [ids] = await tokens(session, server, {**GOOD, "temperature": 1, "seed": 1})
    for _ in range(10):
        await tokens(session, server, {**GOOD, "temperature": 1, "seed": 1, "stop_token_ids": [ids[3]]})
        status, answer = await send(session, server, "/flush_cache", {})
        assert status == 200, answer
