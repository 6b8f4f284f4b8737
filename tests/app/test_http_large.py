"""Large bodies: nothing over 32 KB is decoded on the loop, whatever it holds and wherever it is sent."""

from __future__ import annotations

import asyncio
import io
import json
import random
import sys
import threading
from typing import Any

import msgspec
import pytest

import app.api.openai.chat
import app.api.request.messages
import app.api.request.prompts
import app.batch.lines
import app.http.body
from app.api.routes import TABLE
from app.batch.lines import SLICE, BadLine, parse_line
from app.http.aside import IDS, MANY
from app.http.body import INLINE
from app.http.decoding import MAX_NESTING
from app.http.pieces import FREED, MAX_ITEMS, MAX_VALUES, BodyWorker, assembled
from app.text.numbers import MAX_SLOW
from tests.rigs.server import Server, know
from tests.rigs.wait import until

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI = [{"role": "user", "content": "hi"}]
MEGABYTE = 2**20


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the bodies that the loop decodes itself."""
    sizes: list[int] = []
    decode = app.http.body._decoded_here

    def counted(decoder: Any, body: bytes) -> Any:
        sizes.append(len(body))
        return decode(decoder, body)

    monkeypatch.setattr(app.http.body, "_decoded_here", counted)
    return sizes


def unknown(values: bytes) -> bytes:
    """A body with a field that no route knows."""
    return b'{"loom_test":' + values + b"}"


HOSTILE = {
    "subnormal floats": unknown(b"[" + b"5e-324," * 150_000 + b"0]"),
    "huge exponents": unknown(b"[" + b"1e300," * 150_000 + b"0]"),
    "small values": unknown(b"[" + b"[]," * 300_000 + b"0]"),
    "nested": unknown(b"[" * 500_000 + b"]" * 500_000),
    "one long number": unknown(b"1" * MEGABYTE),
    "no JSON": b"[" * MEGABYTE,
    "no text": b'"\xff' * MEGABYTE,
}

POSTS = sorted({each.path for each in TABLE if each.method == "POST" and each.path != "/v1/files"})


async def test_no_route_decodes_a_large_body_on_the_loop(server: Server, here: list[int]) -> None:
    """Routes read bodies through one function: each of them gets one body, and one of them gets all."""
    bodies = [(path, list(HOSTILE)[i % len(HOSTILE)]) for i, path in enumerate(POSTS)]
    for path, name in bodies + [(CHAT, name) for name in HOSTILE]:
        async with server.http.post(path.replace("{id}", "x"), data=io.BytesIO(HOSTILE[name])) as response:
            assert response.status < 500, (path, name, await response.text())
    assert not here


async def test_each_limit_is_told_with_its_field(server: Server, here: list[int]) -> None:
    for body, param, words in (
        (
            {"messages": HI, "custom_params": {str(i): 1 for i in range(MAX_VALUES + 1)}},
            "custom_params",
            "20,000",
        ),
        ({"messages": [{"role": "user", "content": [1] * (MAX_VALUES + 1)}]}, "messages[0]", "20,000"),
        ({"messages": [{}] * (MAX_ITEMS + 1)}, "messages", "32,768"),
        ({"messages": HI, "x": [5e-324] * (MAX_SLOW + 1)}, None, "10,000 numbers"),
        ({"messages": HI, "chat_template_kwargs": {"a": "b" * INLINE, "n": 2**70}}, None, "64 bits"),
    ):
        async with server.http.post(CHAT, data=io.BytesIO(json.dumps(body).encode())) as response:
            answer = (await response.json())["error"]
        assert (response.status, answer["param"]) == (400, param)
        assert words in answer["message"]
    assert not here
    assert not server.engine.runs


def wide(levels: int, width: int) -> object:
    """Lists inside one another, with so many values on each level."""
    value: object = 0
    for _ in range(levels):
        value = [value, *[0] * (width - 1)]
    return value


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {}, "messages"),
        (CHAT, {"messages": HI}, "documents"),
        (CHAT, {"messages": HI}, "tools"),
        ("/v1/messages", {"messages": HI, "max_tokens": 1}, "system"),
        (RESPONSES, {}, "input"),
        ("/v2/chat", {"messages": HI}, "documents"),
    ],
)
async def test_values_count_on_every_level(server: Server, path: str, body: Any, param: str) -> None:
    """2 million of them, 78,000 on each level, stopped every stream for 0.2 to 0.4 s."""
    status, answer = await server.post(path, {**body, param: [{"x": wide(25, 780)}] * 6})
    assert status == 400
    assert f"'{param}' has more than 100,000 values." in str(answer)


@pytest.mark.parametrize("size", [0, 2 * INLINE])
async def test_what_can_be_read_can_be_passed_on(server: Server, size: int) -> None:
    """Python's limit of nested calls is reached at some depth. What was read just above it could not be read
    from the helper process, or written to the client: a 500."""
    rest = f'"user":"{"u" * size}"}}'
    for depth in range(MAX_NESTING - 1, 1000, 3):
        deep = "[" * depth + "]" * depth
        for path, field in ((CHAT, f'"messages":[{{"x":{deep}}}]'), (RESPONSES, f'"tools":[{{"x":{deep}}}]')):
            status, answer = await server.post(path, data=f'{{"input":"hi",{field},{rest}'.encode())
            assert status == 400, (depth, path, answer)
    deep = "[" * (MAX_NESTING - 1) + "]" * (MAX_NESTING - 1)
    data = f'{{"messages":[{{"role":"user","content":"[[{{"}}],"x":{deep},{rest}'.encode()
    assert (await server.post(CHAT, data=data))[0] == 200


async def test_a_small_body_of_slow_numbers_is_none_of_the_loop_s(server: Server, here: list[int]) -> None:
    body = {"messages": HI, "max_tokens": 1, "metadata": [5e-324] * 4_000}
    assert len(json.dumps(body)) < INLINE
    assert (await server.post(CHAT, body))[0] == 200
    assert not here


async def test_an_id_that_looks_like_a_slow_number_is(server: Server, here: list[int]) -> None:
    body = {"messages": HI, "max_tokens": 1, "user": "file-71e308aa-90e123"}
    assert (await server.post(CHAT, body))[0] == 200
    assert here == [len(json.dumps(body))]


class Inner(msgspec.Struct, kw_only=True):
    """A part of one."""

    text: str | None = None
    ids: list[int] | None = None


class Everything(msgspec.Struct, kw_only=True):
    """Every shape of field that bodies have."""

    text: str | None = None
    texts: str | list[str] | None = None
    ids: list[int] | None = None
    lists: list[int | list[int]] | None = None
    numbers: list[float] | None = None
    objects: list[dict[str, Any]] | None = None
    raw: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    inner: Inner | None = None
    listed: list[Inner] | None = None
    flag: bool = True
    renamed: int = msgspec.field(default=0, name="another")


LONG = list(range(10_000))
EVERYTHING: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a text": {"text": "é😀a" * 50_000},
    "an empty text": {"text": "", "texts": [], "ids": []},
    "texts": {"texts": ["a" * 20_000, "b" * 100_000, "", "c"] * 3},
    "ids": {"ids": LONG},
    "lists of ids": {"lists": [[1, 2], LONG, [], LONG, LONG, [3]]},
    "short lists of ids": {"lists": [[1, 2]] * 30_000},
    "numbers": {"numbers": [0.5, 2, *map(float, LONG)]},
    "objects": {"objects": [{"role": "user", "content": "x" * i} for i in range(1_000)]},
    "raw": {"raw": LONG},
    "structs": {"inner": {"ids": [1]}, "listed": [{"text": "x" * 500}] * 200, "flag": False, "another": 5},
    "null": {"text": None, "objects": None},
}


@pytest.mark.parametrize("name", EVERYTHING)
async def test_what_comes_back_in_pieces_is_what_was_sent(name: str) -> None:
    body = msgspec.json.encode(EVERYTHING[name])
    packed = BodyWorker(f"{__name__}:Everything".encode())(body)
    assert await assembled(Everything, bytearray(packed)) == msgspec.json.decode(body, type=Everything)


async def test_long_lists_are_freed_over_several_turns_of_the_loop() -> None:
    """Freeing 20,000 messages with parts in one go held the GIL for 5.6 ms."""
    count = 3 * FREED + 1
    sent = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}] * count}
    worker = BodyWorker(b"app.api.request.schema:ChatBody")
    body = await assembled(app.api.openai.chat.ChatBody, worker(json.dumps(sent).encode()))
    assert body.messages is not None
    first, last = body.messages[0], body.messages[-1]
    held = sys.getrefcount(first)
    del body
    turn, freed = 0, {}
    while len(freed) < 2:
        turn += 1
        await asyncio.sleep(0)
        if sys.getrefcount(last) < held:
            freed.setdefault("last", turn)
        if sys.getrefcount(first) < held:
            freed.setdefault("first", turn)
    assert freed == {"last": 1, "first": 4}


async def test_honest_large_bodies_work(server: Server, here: list[int]) -> None:
    ids = [i % 250 for i in range(60_000)]
    talk = [{"role": ("user", "assistant")[i % 2], "content": f"turn {i}"} for i in range(6_001)]
    for path, body in (
        (COMPLETIONS, {"prompt": ids, "max_tokens": 1, "truncate_prompt_tokens": 10}),
        (COMPLETIONS, {"prompt": [ids[:300]] * 200, "max_tokens": 1, "truncate_prompt_tokens": 10}),
        (COMPLETIONS, {"prompt": "word " * 200_000, "max_tokens": 1, "truncate_prompt_tokens": 10}),
        (CHAT, {"messages": talk, "max_tokens": 1, "truncate_prompt_tokens": 10}),
        ("/v1/tokenize", {"prompt": "word " * 200_000}),
    ):
        await server.ask(path, body)
    assert not here


async def test_who_leaves_while_a_body_is_decoded_stops_nobody(server: Server) -> None:
    body = json.dumps({"messages": HI, "max_tokens": 1, "user": "u" * MEGABYTE}).encode()
    leavers = [asyncio.ensure_future(server.post(CHAT, data=io.BytesIO(body))) for _ in range(8)]
    helpers: Any = server.service.loaded.bodies
    await until(lambda: helpers._long._child is not None)
    child = helpers._long._child
    for each in leavers:
        each.cancel()
    async with server.http.post(CHAT, data=io.BytesIO(body)) as response:
        assert response.status == 200
    assert helpers._long._child is child, "the process goes on"


async def test_a_process_that_dies_fails_its_job_alone(server: Server) -> None:
    body = {"messages": HI, "max_tokens": 1, "user": "u" * INLINE}
    assert (await server.post(CHAT, body))[0] == 200
    helpers: Any = server.service.loaded.bodies
    helpers._short._child.kill()
    assert (await server.post(CHAT, body))[0] == 200


async def test_an_id_is_looked_at_only_as_long_as_ids_are(server: Server) -> None:
    """2,048 names were made of it, to look for the prompts of one request."""
    for path, body, param in (
        ("/abort_request", {"rid": "a" * 1_000}, "rid"),
        ("/abort_requests", {"request_ids": ["a" * 1_000]}, "request_ids"),
    ):
        assert (await server.refused(path, body))["param"] == param


@pytest.mark.parametrize("name", ["stop_token_ids", "logprob_token_ids"])
async def test_lists_of_ids_are_counted_before_they_are_read(server: Server, name: str) -> None:
    """The first is no id: it would be named if it had been looked at."""
    status, answer = await server.post(CHAT, {"messages": HI, "logprobs": True, name: [-1] * 1_000})
    assert (status, answer["error"]["param"]) == (400, name)
    assert "got 1000" in answer["error"]["message"]


CALLS = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a":"' + "b" * 999 + '"}'}}]


@pytest.mark.parametrize(
    "messages",
    [HI * (MANY + 1), [*HI, {"role": "assistant", "tool_calls": CALLS * 50}]],
    ids=["many", "calls"],
)
async def test_long_conversations_are_gone_through_off_the_loop(
    server: Server, monkeypatch: pytest.MonkeyPatch, messages: list[dict[str, Any]]
) -> None:
    threads: set[int] = set()
    check = app.api.request.messages.check_messages
    monkeypatch.setattr(
        "app.api.request.messages.check_messages",
        lambda sent: (threads.add(threading.get_ident()), check(sent))[1],
    )
    body = {"messages": messages, "max_tokens": 1, "truncate_prompt_tokens": 10}
    assert (await server.post(CHAT, body))[0] == 200
    assert threads and threading.get_ident() not in threads


async def test_grammars_of_many_arguments_are_made_off_the_loop(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 MB of tools, of which no grammar could be compiled, stopped every stream for 0.5 s."""
    know(server, "qwen3_coder")
    threads: set[int] = set()
    make = app.api.openai.chat.constrained
    monkeypatch.setattr(
        "app.api.openai.chat.constrained", lambda *sent: (threads.add(threading.get_ident()), make(*sent))[1]
    )
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2_000)}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    body = {"messages": HI, "max_tokens": 1, "truncate_prompt_tokens": 10, "tools": tools}
    assert (await server.post(CHAT, {**body, "tool_choice": "required"}))[0] == 200
    assert threads and threading.get_ident() not in threads
    body["tools"] = [{**tools[0], "function": {"name": f"f{i}", "parameters": schema}} for i in range(6)]
    assert (await server.post(CHAT, body))[0] == 200, "nothing is held to them"
    status, answer = await server.post(CHAT, {**body, "tool_choice": "required"})
    assert (status, answer["error"]["param"]) == (400, "tools")
    assert "at most 262,144" in answer["error"]["message"]


async def test_the_arguments_of_a_call_are_counted_before_they_are_read(server: Server) -> None:
    for inside in ("[]," * MAX_VALUES + "1", "5e-324," * 1_000 + "1"):
        call = {"function": {"name": "f", "arguments": f'{{"a":[{inside}]}}'}}
        error = await server.refused(CHAT, {"messages": [*HI, {"role": "assistant", "tool_calls": [call]}]})
        assert error["param"] == "messages[1].tool_calls[0].function.arguments"
        assert "values than" in error["message"]


def test_a_line_of_a_batch_with_slow_numbers_is_refused_unread() -> None:
    body = {"x": [5e-324] * (MAX_SLOW + 100)}
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": body}
    with pytest.raises(BadLine, match="exponents"):
        parse_line(1, json.dumps(line).encode(), (CHAT,))


def test_long_values_of_a_batch_line_are_not_read_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    decode = app.batch.lines._decode
    monkeypatch.setattr(app.batch.lines, "_decode", lambda text: (sizes.append(len(text)), decode(text))[1])
    for values in (
        "a" * 3 * SLICE,
        ["a"] * SLICE,
        [[[]]] * SLICE,
        {"x": {str(i): [i] for i in range(SLICE)}},
    ):
        body = {"messages": values}
        for line in (
            {"custom_id": "a", "method": "POST", "url": CHAT, "body": body},
            {"extra": values, "custom_id": "a", "body": body, "url": CHAT, "more": [values]},
        ):
            assert json.loads(parse_line(1, json.dumps(line).encode(), (CHAT,)).body) == body
    assert max(sizes) < 2_000
    for hostile in (
        '{"custom_id":"%s","body":{}}' % ("x" * 2 * SLICE),
        "[" * 2 * SLICE,
        '{"a":"' + "x" * 2 * SLICE,
    ):
        with pytest.raises(BadLine):
            parse_line(1, hostile.encode(), (CHAT,))


@pytest.mark.parametrize("slice", [40, 50, 64])
def test_batch_lines_are_cut_where_their_values_end(slice: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app.batch.lines, "SLICE", slice)
    chance = random.Random(slice)

    def value(depth: int) -> object:
        match chance.randrange(6 if depth else 4):
            case 0:
                return chance.random()
            case 1:
                return '\\a"{}[]é' * chance.randrange(6)
            case 2 | 3:
                return None
            case 4:
                return [value(depth - 1) for _ in range(chance.randrange(5))]
        return {'k\\"]' * chance.randrange(3) + str(i): value(depth - 1) for i in range(chance.randrange(4))}

    for _ in range(500):
        body = {"a": value(3), "b": value(3)}
        line = {"x": value(3), "custom_id": "a", "url": CHAT, "body": body, "y": value(2)}
        assert json.loads(parse_line(1, json.dumps(line).encode(), (CHAT,)).body) == body


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(
    ("path", "name", "fields"),
    [
        (COMPLETIONS, "prompt", {"max_tokens": 1, "truncate_prompt_tokens": 10}),
        ("/generate", "input_ids", {"sampling_params": {"max_new_tokens": 1}}),
        ("/inference/v1/generate", "token_ids", {"sampling_params": {"max_tokens": 1}}),
    ],
)
async def test_many_token_ids_are_checked_off_the_loop(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str, name: str, fields: dict[str, Any], many: bool
) -> None:
    threads: list[int] = []
    check = app.api.request.prompts.check_ids

    def noted(*arguments: Any) -> Any:
        threads.append(threading.get_ident())
        return check(*arguments)

    monkeypatch.setattr(app.api.request.prompts, "check_ids", noted)
    if many and name == "token_ids":
        return  # takes one prompt
    ids = [97] * (IDS * (MANY + 2))
    await server.post(path, {name: [[97, 97], ids] if many else ids, **fields})
    assert threads and threading.get_ident() not in threads
