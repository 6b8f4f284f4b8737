"""Streams: order, bytes, slow readers, silence, failures, clients that go away."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from app.api.openai.stream import Chunks
from app.engine.job import Piece
from app.http import burst, sse
from app.http.access import CLIENT_GONE
from app.http.keys import BURST, REQUEST_COUNTS
from app.parsers.registry import REASONING
from core.config import ServeConfig
from core.errors import Overloaded
from core.types import Finish, FinishReason
from tests.rigs.engine import FakeRun
from tests.rigs.server import Server, Start, know
from tests.rigs.wait import PATIENCE, settle, until

HI = [{"role": "user", "content": "hi"}]
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
STOP = Finish(FinishReason.STOP, "END")
HERE = ("app.", "core")
"""Modules whose objects a request makes."""


def post(path: str, body: object, version: str = "1.1") -> bytes:
    """The bytes of a request."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/{version}\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def first_run(server: Server) -> FakeRun:
    await until(lambda: bool(server.engine.runs))
    return server.engine.runs[-1]


async def begun(server: Server, path: str, body: dict[str, Any]) -> tuple[asyncio.Task[list[str]], FakeRun]:
    """The events of a stream to come, and its run, which waits to be told what to answer."""
    server.engine.manual = True
    task = asyncio.create_task(server.events(path, {**body, "stream": True}))
    return task, await first_run(server)


async def send(server: Server, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A new connection on which `request` was sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request)
    return reader, writer


async def test_chat_stream_byte_for_byte(server: Server) -> None:
    body = {
        "messages": HI,
        "stream": True,
        "rid": "r1",
        "stop": "END",
        "max_tokens": 9,
        "max_completion_tokens": 5,
    }
    server.engine.manual = True
    reader, writer = await send(server, post(CHAT, body))
    run = await first_run(server)
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    assert head.startswith("http/1.1 200 ok\r\n")
    for line in (
        "content-type: text/event-stream",
        "cache-control: no-cache",
        "x-accel-buffering: no",
        "transfer-encoding: chunked",
    ):
        assert f"\r\n{line}\r\n" in head

    async def chunk() -> bytes:
        size = int(await reader.readuntil(b"\r\n"), 16)
        return (await reader.readexactly(size + 2))[:-2]

    run.push(0, Piece('He"l', [1]))
    first = await chunk()
    created = json.loads(first[6:])["created"]
    before = (
        f'data: {{"id":"r1","object":"chat.completion.chunk","created":{created},"model":"org/tiny",'
        '"choices":[{"index":0,"delta":'
    ).encode()
    plain = b',"logprobs":null,"finish_reason":null}]}\n\n'
    assert first == before + b'{"role":"assistant","content":"He\\"l"}' + plain
    run.push(0, Piece("", [2]))  # half a character: nothing to tell yet
    run.push(0, Piece("é\n", [3]))
    assert await chunk() == before + '{"content":"é\\n"}'.encode() + plain
    run.push(0, Piece("!", [4], None, STOP))
    end = b',"logprobs":null,"finish_reason":"stop","matched_stop":"END","stop_reason":"END"}]}\n\n'
    last = before + b'{"content":"!"}' + plain + before + b"{}" + end
    assert await chunk() == last + b"data: [DONE]\n\n", "the last events are one write"
    assert await reader.readexactly(5) == b"0\r\n\r\n"
    writer.close()


async def test_the_head_waits_for_the_first_event(server: Server) -> None:
    server.engine.manual = True
    client = socket.create_connection(("127.0.0.1", server.port))
    client.sendall(post(COMPLETIONS, {"prompt": "x", "stream": True}))
    client.setblocking(False)
    run = await first_run(server)
    await settle()
    with pytest.raises(BlockingIOError):
        client.recv(1)
    run.push(0, Piece("x", [1], None, STOP))
    reader, writer = await asyncio.open_connection(sock=client)
    head, event = (await reader.readuntil(b"[DONE]")).split(b"\r\n\r\n", 1)
    assert head.startswith(b"HTTP/1.1 200 OK\r\n") and b'"text":"x"' in event
    writer.close()


async def test_the_head_comes_before_a_late_first_event(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(burst, "HEAD_SECONDS", 0.01)
    server.engine.manual = True
    for number in range(3):  # the timer ends and begins again
        reader, writer = await send(server, post(COMPLETIONS, {"prompt": "x", "stream": True}))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
        server.engine.runs[number].push(0, Piece("x", [1], None, STOP))
        assert (await reader.readuntil(b"[DONE]")).count(b"HTTP/1.1") == 0, "once"
        writer.close()


async def test_no_head_is_sent_to_a_client_that_is_gone(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(burst, "HEAD_SECONDS", 0.05)
    server.engine.manual = True
    _, gone = await send(server, post(COMPLETIONS, {"prompt": "x", "stream": True}))
    run = await first_run(server)
    await settle()
    gone.transport.abort()
    await until(lambda: run.aborted)
    reader, writer = await send(server, post(COMPLETIONS, {"prompt": "x", "stream": True}))
    await reader.readuntil(b"\r\n\r\n")  # its own came later
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    writer.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_closes_before_its_answer_begins_is_no_error(
    server: Server, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The client may close its half of the connection alone."""
    server.engine.manual = True
    counts, before = server.app[REQUEST_COUNTS], len(server.engine.runs)
    for how in (socket.SHUT_WR, socket.SHUT_RDWR):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(post(COMPLETIONS, {"prompt": "x", "stream": stream}))
            client.shutdown(how)
    await until(lambda: counts[COMPLETIONS, "POST", CLIENT_GONE] == 2)
    assert all(run.aborted for run in server.engine.runs[before:])
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_first_token_without_text_still_tells_the_role(server: Server) -> None:
    events, run = await begun(server, CHAT, {"messages": HI})
    run.push(0, Piece("", [1]))
    await asyncio.sleep(0)
    run.push(0, Piece("x", [2], None, STOP))
    deltas = [json.loads(event)["choices"][0]["delta"] for event in (await events)[:-1]]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content", "") for delta in deltas) == "x"


async def test_usage_only_when_asked(server: Server) -> None:
    server.engine.cached = 4
    body: dict[str, Any] = {"messages": HI, "stream": True, "max_tokens": 2}
    assert not any('"usage"' in event for event in await server.events(CHAT, body))
    body["stream_options"] = {"include_usage": True}
    *chunks, last, done = await server.events(CHAT, body)
    assert done == "[DONE]"
    assert all(json.loads(chunk)["usage"] is None for chunk in chunks)
    assert json.loads(last)["choices"] == []
    assert json.loads(last)["usage"] == {
        "prompt_tokens": 20,
        "completion_tokens": 2,
        "total_tokens": 22,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    body["stream_options"] = {"continuous_usage_stats": True}
    *chunks, done = await server.events(CHAT, body)
    assert [json.loads(chunk)["usage"]["completion_tokens"] for chunk in chunks][-1] == 2
    assert all(json.loads(chunk)["choices"] for chunk in chunks)


async def test_choices_of_prompts_share_a_stream(server: Server) -> None:
    body = {"prompt": ["ab", "cd"], "n": 2, "stream": True, "max_tokens": 3, "echo": True}
    *chunks, done = await server.events(COMPLETIONS, body)
    texts, ends = [""] * 4, [""] * 4
    for chunk in map(json.loads, chunks):
        (choice,) = chunk["choices"]
        assert not ends[choice["index"]]
        texts[choice["index"]] += choice["text"]
        ends[choice["index"]] = choice["finish_reason"] or ""
    assert texts == ["abHello wörld", "abHello wörld", "cdHello wörld", "cdHello wörld"]
    assert ends == ["length"] * 4 and done == "[DONE]"


@pytest.mark.parametrize("n", [1, 2])
async def test_streamed_logprobs_are_those_of_the_whole_answer(server: Server, n: int) -> None:
    body = {"prompt": "abc", "max_tokens": 3, "logprobs": 2, "echo": True, "n": n, "prompt_logprobs": 1}
    _, whole = await server.post(COMPLETIONS, body)
    streamed: list[dict[str, list[Any]]] = [{} for _ in range(n)]
    for event in (await server.events(COMPLETIONS, {**body, "stream": True}))[:-1]:
        (choice,) = json.loads(event)["choices"]
        for name, listed in (choice["logprobs"] or {}).items():
            streamed[choice["index"]].setdefault(name, []).extend(listed)
    for index in range(n):
        assert streamed[index] == whole["choices"][index]["logprobs"]
        assert streamed[index]["tokens"] == ["<s>", "a", "b", "c", "H", "l", " "]
        assert streamed[index]["token_logprobs"][0] is None
        assert streamed[index]["text_offset"] == [0, 0, 1, 2, 3, 4, 5]


async def test_prompt_logprobs_are_awaited_by_a_choice_that_begins_early(server: Server) -> None:
    body = {"prompt": "ab", "max_tokens": 1, "logprobs": 0, "echo": True, "n": 2}
    task, run = await begun(server, COMPLETIONS, body)
    for index in (1, 0):
        await asyncio.sleep(0.01)
        run.push(index, run.piece(0, 1))
    for event in (await task)[:-1]:
        (choice,) = json.loads(event)["choices"]
        if choice["finish_reason"] is None:
            assert choice["logprobs"]["token_logprobs"] == pytest.approx([None, -0.97, -0.98, -0.72])


async def test_a_stream_without_prompt_logprobs_does_not_wait_for_every_choice(server: Server) -> None:
    server.engine.manual = True
    sampling = {"n": 2, "max_tokens": 1, "prompt_logprobs": 1}
    body = {"token_ids": [97, 98], "sampling_params": sampling, "stream": True}
    async with server.http.post("/inference/v1/generate", json=body) as response:
        run = await first_run(server)
        run.push(1, Piece("x", [120]))
        async with asyncio.timeout(PATIENCE):
            event = json.loads((await response.content.readuntil(b"\n\n"))[6:])
    (choice,) = event["choices"]
    assert (choice["index"], choice["token_ids"]) == (1, [120])


async def test_chat_logprobs_and_token_ids_streamed(server: Server) -> None:
    body = {"messages": HI, "max_tokens": 3, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    _, whole = await server.post(CHAT, body)
    content, ids = [], []
    events = [json.loads(event) for event in (await server.events(CHAT, {**body, "stream": True}))[:-1]]
    for event in events:
        choice = event["choices"][0]
        content += (choice["logprobs"] or {"content": []})["content"]
        ids += choice.get("token_ids", [])
    assert content == whole["choices"][0]["logprobs"]["content"]
    assert content[0] == {
        "token": "H",
        "logprob": -0.72,
        "bytes": [72],
        "top_logprobs": [{"token": "H", "logprob": 0.0, "bytes": [72]}],
    }
    assert ids == whole["choices"][0]["token_ids"] == [72, 108, 32]
    assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert not any("prompt_token_ids" in each for event in events[1:] for each in (event, *event["choices"]))


@pytest.mark.parametrize("parsed", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HI}),
        (COMPLETIONS, {"prompt": "abc"}),
        ("/inference/v1/generate", {"token_ids": [97]}),
    ],
)
async def test_streams_end_with_usage_where_the_operator_says_so(
    server: Server, path: str, body: dict[str, Any], parsed: bool
) -> None:
    loaded = server.service.loaded
    family = REASONING["think"] if parsed else None
    told = msgspec.structs.replace(loaded, settings=ServeConfig(force_include_usage=True), reasoning=family)
    server.service.ready(told)
    *_, last, done = await server.events(path, {**body, "stream": True})
    assert done == "[DONE]" and json.loads(last)["choices"] == []
    assert json.loads(last)["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("parsed", [False, True])
async def test_prompt_ids_are_told_once_beside_the_choices(server: Server, n: int, parsed: bool) -> None:
    """The prompt's ids are where vLLM's clients look for them; each choice has its own tokens."""
    if parsed:
        know(server, reasoning="think")
    body = {"messages": HI, "max_tokens": 2, "n": n, "stream": True, "return_token_ids": True}
    events = [json.loads(event) for event in (await server.events(CHAT, body))[:-1]]
    prompt = list(b"user: hi\nassistant: ")
    assert [event.get("prompt_token_ids") for event in events] == [prompt] + [None] * (len(events) - 1)
    ids: list[list[int]] = [[] for _ in range(n)]
    for event in events:
        (choice,) = event["choices"]
        ids[choice["index"]] += choice.get("token_ids", [])
        assert "prompt_token_ids" not in choice
    assert ids == [[72, 108]] * n


async def test_generate_streams_cumulative_text(server: Server) -> None:
    body = {"text": "abc", "stream": True, "sampling_params": {"max_new_tokens": 4}, "return_logprob": True}
    task, run = await begun(server, GENERATE, {**body, "rid": "g"})
    for at in range(4):
        run.push(0, run.piece(at, 4))
        await asyncio.sleep(0.01)
    *events, done = await task
    texts = [json.loads(event)["text"] for event in events]
    assert texts[-1] == "Hello wörld 😀" and all(b.startswith(a) for a, b in pairwise(texts))
    last = json.loads(events[-1])
    assert last["output_ids"] == [72, 108, 32, 32]
    assert last["meta_info"] == {
        "id": "g",
        "finish_reason": {"type": "length", "length": 4},
        "prompt_tokens": 4,
        "completion_tokens": 4,
        "cached_tokens": 0,
        "output_token_logprobs": [
            [-0.72, 72, None],
            [-1.08, 108, None],
            [-0.32, 32, None],
            [-0.32, 32, None],
        ],
    }
    assert done == "[DONE]"


async def test_http_1_0_ends_with_the_connection(server: Server) -> None:
    reader, writer = await send(server, post(CHAT, {"messages": HI, "stream": True}, "1.0"))
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert body.startswith(b"data: {") and body.endswith(b"data: [DONE]\n\n")
    writer.close()


async def test_requests_sent_ahead_are_answered_in_order(server: Server) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    body = {"messages": HI, "stream": True, "max_tokens": 2}
    writer.write(b"".join(post(CHAT, {**body, "rid": rid}) for rid in ("one", "two")))
    for rid in ("one", "two"):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        answer = await reader.readuntil(b"\r\n0\r\n\r\n")
        assert answer.count(f'"id":"{rid}"'.encode()) == answer.count(b'"id":') == 3
        assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    writer.close()


async def test_text_before_a_failure_is_told(server: Server) -> None:
    task, run = await begun(server, CHAT, {"messages": HI})
    run.push(0, Piece("so far", [1], None, Finish(FinishReason.ERROR, message="lost")))
    text, error, done = await task
    assert json.loads(text)["choices"][0]["delta"]["content"] == "so far"
    assert json.loads(error)["error"]["message"] == "lost" and done == "[DONE]"


async def test_long_last_events_wait_for_those_of_other_streams(server: Server) -> None:
    """They are sent once the engine's callback is over, and the rest of the answer after them."""
    server.engine.manual = True
    body = {"messages": HI, "stream": True, "stream_options": {"include_usage": True}}
    tasks, runs = [], []
    for _ in range(2):
        tasks.append(asyncio.create_task(server.events(CHAT, body)))
        await until(lambda: len(server.engine.runs) == len(tasks))
        runs.append(server.engine.runs[-1])
        runs[-1].push(0, Piece("a", [1]))
    long = "x" * 2 * sse.KEPT
    await settle()
    runs[0].push(0, Piece("b", [2]))
    runs[1].push(0, Piece(long, [2], None, STOP))
    assert len(server.app[BURST]._events) == 2, "nothing is sent yet"
    runs[0].push(0, Piece("", [], None, STOP))
    for task, wanted in zip(tasks, ("ab", "a" + long), strict=True):
        *texts, finish, usage, done = await task
        deltas = [json.loads(event)["choices"][0]["delta"] for event in texts]
        assert "".join(delta.get("content", "") for delta in deltas) == wanted
        assert json.loads(finish)["choices"][0]["finish_reason"] == "stop"
        assert json.loads(usage)["usage"]["completion_tokens"] == 2 and done == "[DONE]"


# -- slow readers and silence ------------------------------------------------------------------------


async def slow_reader(server: Server, request: bytes) -> socket.socket:
    """Send `request` by a socket with a small receive buffer that nobody reads."""
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(slow, ("127.0.0.1", server.port))
    await loop.sock_sendall(slow, request)
    return slow


@pytest.mark.parametrize("path", [CHAT, GENERATE])
async def test_a_slow_reader_gets_merged_deltas_and_the_whole_text(start: Start, path: str) -> None:
    server = await start(sndbuf=4096)
    server.engine.manual = True
    body = {"messages": HI, "stream": True} if path == CHAT else {"text": "hi", "stream": True}
    if path == CHAT:
        body["stream_options"] = {"include_usage": True}
    slow = await slow_reader(server, post(path, body))
    run = await first_run(server)
    tokens = 5000
    for at in range(tokens):
        run.push(0, Piece(f"{at} ", [at % 256]))
        if at % 50 == 0:
            await asyncio.sleep(0)
    run.push(0, Piece("", [], None, STOP))
    await asyncio.wait_for(run.wait(), PATIENCE)  # the engine was never held up
    reader, writer = await asyncio.open_connection(sock=slow)
    await reader.readuntil(b"\r\n\r\n")
    raw = b""
    while (size := int(await reader.readuntil(b"\r\n"), 16)) > 0:
        raw += (await reader.readexactly(size + 2))[:-2]
    events = [event[6:] for event in raw.decode().split("\n\n")[:-1]]
    assert events.pop() == "[DONE]"
    assert len(events) < tokens / 2
    wanted = "".join(f"{at} " for at in range(tokens))
    if path == CHAT:
        assert json.loads(events.pop())["usage"]["completion_tokens"] == tokens
        got = "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in events)
    else:
        got = json.loads(events[-1])["text"]
    assert got == wanted
    writer.close()


async def test_a_reader_that_never_reads_is_dropped(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "STALL", 0.05)
    server = await start(sndbuf=4096)
    server.engine.manual = True
    slow = await slow_reader(server, post(CHAT, {"messages": HI, "stream": True}))
    run = await first_run(server)
    for at in range(50):
        run.push(0, Piece("x" * 10_000, [at]))
        await asyncio.sleep(0)
    await until(lambda: run.aborted)
    slow.close()


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_a_reader_that_does_not_take_the_end_is_dropped(
    start: Start, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """The request ends and no longer counts against its account's limit."""
    monkeypatch.setattr(sse, "STALL", 0.05)
    server = await start(sndbuf=4096)
    server.engine.manual = True
    slow = await slow_reader(server, post(path, {"messages": HI, "stream": True, "max_tokens": 9}))
    run = await first_run(server)
    run.push(0, Piece("x" * 500_000, [1], None, STOP))
    await until(lambda: server.app[REQUEST_COUNTS][path, "POST", CLIENT_GONE] == 1)
    slow.close()


async def test_silence_is_broken_by_comments(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse.EventStream.__init__, "__defaults__", (0.01, sse.OPENAI))
    server.engine.manual = True
    async with server.http.post(CHAT, json={"messages": HI, "stream": True}) as response:
        run = await first_run(server)
        assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        run.push(0, Piece("x", [1], None, STOP))
        assert (await response.read()).endswith(b"data: [DONE]\n\n")


async def test_no_comment_is_due_once_a_wait_has_ended(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams: list[sse.EventStream] = []
    wait = sse.EventStream.wait

    async def seen(stream: sse.EventStream) -> None:
        streams.append(stream)
        await wait(stream)

    monkeypatch.setattr(sse.EventStream, "wait", seen)
    server.engine.manual = True
    async with server.http.post(CHAT, json={"messages": HI, "stream": True}) as response:
        run = await first_run(server)
        await until(lambda: bool(streams))
        run.push(0, Piece("x", [1], None, STOP))
        await response.read()
    assert all(stream._timer.cancelled() for stream in streams)


# -- failures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failure", "status", "kind"),
    [
        (Finish(FinishReason.ERROR, message="The device was lost."), 500, "server_error"),
        (Finish(FinishReason.ABORT, message="Waited too long."), 503, "service_unavailable_error"),
    ],
)
async def test_failure_of_the_engine(server: Server, failure: Finish, status: int, kind: str) -> None:
    server.engine.fail_at, server.engine.failure = 2, failure
    for path, body in (
        (CHAT, {"messages": HI}),
        (COMPLETIONS, {"prompt": "a", "n": 2}),
        (GENERATE, {"text": "a"}),
    ):
        events = await server.events(path, {**body, "stream": True})
        assert events[-1] == "[DONE]"
        error = json.loads(events[-2])["error"]
        assert (error["message"], error["type"], error["param"]) == (failure.message, kind, None)
        async with server.http.post(path, json=body) as response:
            assert response.status == status
            assert (await response.json())["error"]["type"] == kind
            if status == 503:
                assert int(response.headers["Retry-After"]) >= 1
                assert int(response.headers["retry-after-ms"]) >= 1
            else:
                assert response.headers["x-should-retry"] == "false"
    assert not server.engine.live


async def test_one_failed_choice_ends_the_others(server: Server) -> None:
    task, run = await begun(server, CHAT, {"messages": HI, "n": 3})
    run.push(1, Piece("", [], None, Finish(FinishReason.ERROR, message="not a number")))
    events = await task
    assert "not a number" in events[-2] and events[-1] == "[DONE]"
    assert run.aborted and not run.open


@pytest.mark.parametrize("length", [1, 2 * sse.KEPT])
async def test_an_error_behind_the_last_events_follows_them(
    server: Server, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    def unmade(*_: object) -> Iterator[bytes]:
        yield b"data: part\n\n"
        raise ValueError("secret")

    monkeypatch.setattr(Chunks, "rest", unmade)
    task, run = await begun(server, CHAT, {"messages": HI})
    run.push(0, Piece("x" * length, [1], None, STOP))
    text, finish, part, error, done = await task
    assert json.loads(text)["choices"][0]["delta"]["content"] == "x" * length
    assert json.loads(finish)["choices"][0]["finish_reason"] == "stop"
    assert part == "part" and done == "[DONE]"
    assert json.loads(error)["error"]["type"] == "server_error"


@pytest.mark.parametrize("part", ["delta", "finish"])
async def test_an_event_that_cannot_be_made_ends_its_own_stream(
    server: Server, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """The event is made inside the engine's callback, where other streams' rows are next."""

    def unmade(*_: object) -> bytes:
        raise ValueError("secret")

    task, run = await begun(server, CHAT, {"messages": HI})
    run.push(0, Piece("a", [1]))
    await asyncio.sleep(0)
    monkeypatch.setattr(Chunks, part, unmade)
    run.push(0, Piece("b", [2], None, STOP))
    *_, error, done = await task
    assert "could not read" in json.loads(error)["error"]["message"] and "secret" not in error
    assert done == "[DONE]"


async def test_abort_by_the_client_is_a_finish_reason(server: Server) -> None:
    task, run = await begun(server, CHAT, {"messages": HI, "rid": "mine"})
    run.push(0, Piece("a", [1]))
    assert await server.post("/abort_request", {"rid": "mine"}) == (200, {"success": True, "aborted": 1})
    *_, finish, done = await task
    assert json.loads(finish)["choices"][0]["finish_reason"] == "abort" and done == "[DONE]"


async def test_overload_says_when_to_come_back(server: Server) -> None:
    server.engine.refusal = Overloaded("The queue is full.", 2.5)
    for stream in (False, True):
        async with server.http.post(CHAT, json={"messages": HI, "stream": stream}) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "3" and response.headers["retry-after-ms"] == "2500"
            assert (await response.json())["error"]["type"] == "rate_limit_error"


STREAMED: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": [5, 6, 7, 8], "n": 2},
    CHAT: {"messages": HI, "stream_options": {"include_usage": True}},
    GENERATE: {"input_ids": [5, 6, 7, 8]},
    "/v1/messages": {"messages": HI},
    "/v1/responses": {"input": "hi"},
    "/v2/chat": {"messages": HI},
    "/api/chat": {"messages": HI},
}


@pytest.mark.parametrize("path", STREAMED)
@pytest.mark.parametrize("leaves", [False, True])
async def test_a_streamed_answer_leaves_nothing_to_the_collector(
    featured: Server, path: str, leaves: bool
) -> None:
    """A stream's objects are freed when it ends: collecting those of many requests would stop every
    stream."""
    most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {"model": "org/tiny", most: 200 if leaves else 9, "stream": True, **STREAMED[path]}

    async def once() -> None:
        async with featured.http.post(path, json=body) as response:
            assert response.status == 200, await response.text()
            await (response.content.readany() if leaves else response.read())
            if leaves:
                response.close()
        await until(lambda: featured.service.loaded.engine.idle)  # type: ignore[attr-defined]
        await asyncio.sleep(0)

    await once()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        await once()
        await until(lambda: not leaves or featured.connections == 0)
        gc.collect()
        assert {type(each).__qualname__ for each in gc.garbage if type(each).__module__[:4] in HERE} == set()
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def test_an_unforeseen_error_tells_nothing_of_the_inside(server: Server) -> None:
    server.engine.refusal = ZeroDivisionError("secret /path")
    async with server.http.post(CHAT, json={"messages": HI}) as response:
        assert response.status == 500 and response.headers["x-should-retry"] == "false"
        assert "secret" not in await response.text()
    server.engine.refusal = None
    assert (await server.post(CHAT, {"messages": HI}))[0] == 200


# -- clients that go away ----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tokens", [0, 2])
async def test_a_client_that_goes_away_frees_its_request(server: Server, stream: bool, tokens: int) -> None:
    server.engine.manual = True
    _, writer = await send(server, post(CHAT, {"messages": HI, "stream": stream, "n": 2}))
    run = await first_run(server)
    for at in range(tokens):
        run.push(0, Piece("x", [at]))
    writer.close()
    await until(lambda: run.aborted)
    assert not server.engine.live


async def test_a_client_that_goes_away_while_its_request_is_starting(server: Server) -> None:
    server.engine.gate = asyncio.Event()
    _, writer = await send(server, post(COMPLETIONS, {"prompt": ["a", "b"]}))
    await server.engine.started.wait()
    loop_tasks = {task for task in asyncio.all_tasks() if "RequestHandler" in repr(task.get_coro())}
    writer.close()
    await until(lambda: all(task.done() for task in loop_tasks))
    server.engine.gate.set()
    await asyncio.sleep(0)
    assert not server.engine.runs


async def test_a_later_prompt_that_is_refused_frees_the_earlier_ones(server: Server) -> None:
    server.engine.manual = True
    assert (await server.refused(COMPLETIONS, {"prompt": ["a", "x" * 600]}))["param"] == "prompt[1]"
    assert server.engine.runs[0].aborted and not server.engine.live
