"""Bad input: the status and the field, never 500, and nothing else disturbed."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.api.request.schema import ChatBody, CompletionBody, NativeBody, NativeSampling
from app.api.routes import make_app
from app.http.server import Runner
from app.service import Service
from core.config import ServeConfig
from tests.rigs.engine import FakeEngine
from tests.rigs.operator import make_loaded
from tests.rigs.server import CARD, Server, Start
from tests.rigs.tokenizer import ByteTokenizer, JoinTemplate

HI = [{"role": "user", "content": "hi"}]
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"


def chat(**fields: object) -> dict[str, object]:
    return {"messages": HI, **fields}


def text(**fields: object) -> dict[str, object]:
    return {"prompt": "hi", **fields}


def native(**fields: object) -> dict[str, object]:
    return {"text": "hi", "sampling_params": fields}


def deep(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = {"a": value}
    return value


IMAGE = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": "http://x/y.png"}}]

CASES: list[tuple[str, object, int, str | None]] = [
    # the body as a whole
    (CHAT, {}, 400, "messages"),
    (COMPLETIONS, {}, 400, "prompt"),
    (GENERATE, {}, 400, "text"),
    (CHAT, [], 400, None),
    (CHAT, "x", 400, None),
    # types
    (CHAT, chat(temperature="hot"), 400, "temperature"),
    (CHAT, chat(max_tokens="many"), 400, "max_tokens"),
    (CHAT, chat(max_tokens=1.5), 400, "max_tokens"),
    (CHAT, chat(n=True), 400, "n"),
    (CHAT, chat(stream="yes"), 400, "stream"),
    (CHAT, chat(stream_options={"include_usage": 3}), 400, "stream_options.include_usage"),
    (CHAT, chat(stop=["a", 1]), 400, "stop[1]"),
    (CHAT, chat(logit_bias=[1]), 400, "logit_bias"),
    (CHAT, chat(logit_bias={"a": 1}), 400, "logit_bias"),
    (CHAT, chat(logit_bias={"1": "x"}), 400, "logit_bias"),
    (CHAT, chat(model=7), 400, "model"),
    (CHAT, {"messages": "hi"}, 400, "messages"),
    (CHAT, {"messages": [1]}, 400, "messages[0]"),
    # ranges
    (CHAT, chat(temperature=-1), 400, "temperature"),
    (CHAT, chat(temperature=1e308), 400, "temperature"),
    (CHAT, chat(top_p=0), 400, "top_p"),
    (CHAT, chat(top_p=1.1), 400, "top_p"),
    (CHAT, chat(top_k=-2), 400, "top_k"),
    (CHAT, chat(top_k=2**63), 400, "top_k"),
    (CHAT, chat(min_p=2), 400, "min_p"),
    (CHAT, chat(presence_penalty=3), 400, "presence_penalty"),
    (CHAT, chat(repetition_penalty=0), 400, "repetition_penalty"),
    (CHAT, chat(seed=-1), 400, "seed"),
    (CHAT, chat(seed=2**64), 400, "seed"),
    (CHAT, chat(n=0), 400, "n"),
    (CHAT, chat(n=129), 400, "n"),
    (CHAT, chat(n=10**9), 400, "n"),
    (CHAT, chat(max_tokens=0), 400, "max_tokens"),
    (CHAT, chat(max_completion_tokens=-1), 400, "max_completion_tokens"),
    (CHAT, chat(max_tokens=10**6), 400, "messages"),
    (CHAT, chat(max_tokens=2, min_tokens=3), 400, "min_tokens"),
    (CHAT, chat(logprobs=True, top_logprobs=1000), 400, "logprobs"),
    (CHAT, chat(top_logprobs=2), 400, "top_logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=-1), 400, "top_logprobs"),
    (CHAT, chat(prompt_logprobs=-1), 400, "prompt_logprobs"),
    (CHAT, chat(logit_bias={"99999": 1}), 400, "logit_bias"),
    (CHAT, chat(logit_bias={"1": 101}), 400, "logit_bias"),
    (CHAT, chat(stop_token_ids=[260]), 400, "stop_token_ids"),
    (CHAT, chat(stop_token_ids=[-1]), 400, "stop_token_ids"),
    (CHAT, chat(stop=["x"] * 1000), 400, "stop"),
    (CHAT, chat(stop=""), 400, "stop"),
    (CHAT, chat(stop_regex="("), 400, "stop_regex"),
    (CHAT, chat(truncate_prompt_tokens=0), 400, "truncate_prompt_tokens"),
    (CHAT, chat(truncation_side="middle", truncate_prompt_tokens=1), 400, "truncation_side"),
    (CHAT, chat(priority=2**40), 400, "priority"),
    (CHAT, chat(cache_salt="s" * 1000), 400, "cache_salt"),
    (CHAT, chat(rid="r" * 1000), 400, "rid"),
    (CHAT, chat(request_id="r" * 1000), 400, "request_id"),
    # messages
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": None}, 400, "messages"),
    (CHAT, {"messages": [{}]}, 400, "messages[0].role"),
    (CHAT, {"messages": [{"role": "", "content": "x"}]}, 400, "messages[0].role"),
    (CHAT, {"messages": [{"role": 5, "content": "x"}]}, 400, "messages[0].role"),
    (CHAT, {"messages": [{"role": "x" * 65, "content": "x"}]}, 400, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [5]}]}, 400, "messages[0].content[0]"),
    (CHAT, {"messages": [*HI, {"role": "user", "content": IMAGE}]}, 400, "messages[1].content[1]"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        400,
        "messages[0].content[0].text",
    ),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": 3}]}, 400, "messages[0].tool_calls"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, 400, "messages[0].tool_calls[0]"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "extra": deep(200)}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "RAISE"}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 600}]}, 400, "messages"),
    # templates and tools
    (CHAT, chat(chat_template="{{ 1 }}"), 400, "chat_template"),
    (CHAT, chat(chat_template_kwargs={"chat_template": "x"}), 400, "chat_template_kwargs.chat_template"),
    (CHAT, chat(chat_template_kwargs={"tokenize": True}), 400, "chat_template_kwargs.tokenize"),
    (CHAT, chat(chat_template_kwargs={"a": deep(100)}), 400, "chat_template_kwargs"),
    (CHAT, chat(add_generation_prompt=True, continue_final_message=True), 400, "continue_final_message"),
    (CHAT, chat(tools=[{}]), 400, "tools[0].function.name"),
    (CHAT, chat(tools=[{"function": {"name": "f", "parameters": deep(100)}}]), 400, "tools"),
    (CHAT, chat(tool_choice="required"), 400, "tool_choice"),
    (CHAT, chat(tool_choice={"type": "function", "function": {"name": "f"}}), 400, "tool_choice"),
    # constraints: test_http_constraint.py has more
    (
        CHAT,
        chat(response_format={"type": "json_schema", "json_schema": {}}),
        400,
        "response_format.json_schema",
    ),
    (CHAT, chat(response_format="json"), 400, "response_format.type"),
    (CHAT, chat(regex="a+", ebnf="root ::= 'a'"), 400, "ebnf"),
    (CHAT, chat(json_schema='"' + "x" * 2**19 + '"'), 400, "json_schema"),
    (CHAT, chat(lora_path="x"), 400, "lora_path"),
    (COMPLETIONS, text(suffix="x"), 400, "suffix"),
    (GENERATE, native(json_schema=[1]), 400, "sampling_params.json_schema"),
    (GENERATE, {"text": "a", "image_data": ["x"]}, 400, "image_data"),
    # the model
    (CHAT, chat(model="gpt-5"), 404, "model"),
    (COMPLETIONS, text(model="gpt-5"), 404, "model"),
    # completions
    (COMPLETIONS, {"prompt": ""}, 400, "prompt"),
    (COMPLETIONS, {"prompt": []}, 400, "prompt"),
    (COMPLETIONS, text(best_of=3), 400, "best_of"),
    (COMPLETIONS, text(n=2, best_of=1), 400, "best_of"),
    (COMPLETIONS, {"prompt": [[]]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": ["a", ""]}, 400, "prompt[1]"),
    (COMPLETIONS, {"prompt": ["a", 1]}, 400, "prompt[1]"),
    (COMPLETIONS, {"prompt": [1, 260]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [1, -1]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [1, 2**62]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [1, 2**70]}, 400, "prompt[1]"),
    (COMPLETIONS, {"prompt": [1, -(2**63)]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [[1], [300]]}, 400, "prompt[1]"),
    (COMPLETIONS, {"prompt": [1.5]}, 400, "prompt[0]"),
    (COMPLETIONS, {"prompt": "x" * 600}, 400, "prompt"),
    (COMPLETIONS, {"prompt": ["a", "x" * 600]}, 400, "prompt[1]"),
    (COMPLETIONS, {"prompt": ["a"] * 2049}, 400, "prompt"),
    (COMPLETIONS, {"prompt": ["a"] * 17, "n": 128}, 400, "n"),
    (COMPLETIONS, text(max_tokens=0), 400, "max_tokens"),
    (COMPLETIONS, text(max_tokens=-1, echo=True), 400, "max_tokens"),
    (COMPLETIONS, text(logprobs=-1), 400, "logprobs"),
    (COMPLETIONS, text(logprobs=True), 400, "logprobs"),
    # generate
    (GENERATE, {"text": "a", "input_ids": [1]}, 400, "text"),
    (GENERATE, {"text": ""}, 400, "text"),
    (GENERATE, {"input_ids": []}, 400, "input_ids"),
    (GENERATE, {"input_ids": [1, [2]]}, 400, "input_ids[1]"),
    (GENERATE, {"input_ids": [[1], [999]]}, 400, "input_ids[1]"),
    (GENERATE, native(temperature=-1), 400, "sampling_params.temperature"),
    (GENERATE, native(temperature="x"), 400, "sampling_params.temperature"),
    (GENERATE, native(max_new_tokens=-1), 400, "sampling_params.max_new_tokens"),
    (GENERATE, native(max_new_tokens=1, min_new_tokens=2), 400, "sampling_params.min_new_tokens"),
    (GENERATE, native(sampling_seed=-5), 400, "sampling_params.sampling_seed"),
    (GENERATE, native(n=1000), 400, "sampling_params.n"),
    (GENERATE, native(stop="x" * 2000), 400, "sampling_params.stop"),
    (GENERATE, {"text": "a", "return_logprob": True, "top_logprobs_num": -1}, 400, "top_logprobs_num"),
    (GENERATE, {"text": "a", "return_logprob": True, "top_logprobs_num": 999}, 400, "top_logprobs_num"),
    (GENERATE, {"text": "a", "top_logprobs_num": -1}, 400, "top_logprobs_num"),
    (GENERATE, {"text": "a", "return_logprob": True, "logprob_start_len": -2}, 400, "logprob_start_len"),
    (
        GENERATE,
        {"input_ids": [5, 6], "return_logprob": True, "logprob_start_len": 2},
        400,
        "logprob_start_len",
    ),
    (
        GENERATE,
        {"input_ids": [5, 6], "return_logprob": True, "logprob_start_len": 9},
        400,
        "logprob_start_len",
    ),
    (GENERATE, {"text": ["a", "b"], "rid": ["x"]}, 400, "rid"),
    (GENERATE, {"text": ["a", "b"], "rid": ["x", "x"]}, 400, "rid"),
    # the small ones
    ("/tokenize", {}, 400, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": HI}, 400, "prompt"),
    ("/tokenize", {"prompt": []}, 400, "prompt"),
    ("/tokenize", {"messages": HI, "chat_template": "x"}, 400, "chat_template"),
    ("/tokenize", {"prompt": "a", "model": "x"}, 404, "model"),
    ("/detokenize", {}, 400, "tokens"),
    ("/detokenize", {"tokens": [260]}, 400, "tokens"),
    ("/detokenize", {"tokens": [1] * 600}, 400, "tokens"),
    ("/detokenize", {"tokens": [[1], [-1]]}, 400, "tokens[1]"),
    ("/detokenize", {"tokens": [[1], 2]}, 400, "tokens[1]"),
    ("/abort_request", {}, 400, "rid"),
    ("/abort_request", {"rid": "nobody"}, 404, "rid"),
]


def nested(body: dict[str, Any]) -> dict[str, Any]:
    """The error, its shape checked."""
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and isinstance(error["type"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    return error


async def test_every_bad_field_is_named_and_none_reaches_the_engine(server: Server) -> None:
    wrong = []
    for path, body, status, param in CASES:
        got, answer = await server.post(path, body)
        error = nested(answer)
        if (got, error["param"]) != (status, param):
            wrong.append((path, str(body)[:80], got, error))
    assert not wrong
    assert not server.engine.live
    status, answer = await server.post(CHAT, chat())
    assert status == 200 and answer["choices"][0]["message"]["content"] == "Hello wörld 😀!"


RAW: list[tuple[bytes, str]] = [
    (b"", "empty"),
    (b"{", "not valid JSON"),
    (b'{"messages":}', "not valid JSON"),
    (b'{"temperature":NaN}', "not valid JSON"),
    (b'{"temperature":Infinity}', "not valid JSON"),
    (b'{"temperature":1e999}', "out of range"),
    (b'{"seed":' + b"9" * 5000 + b"}", "out of range"),
    (b'{"model":"\xff"}', "UTF-8"),
    (b'{"model":"\xed\xa0\x80"}', "UTF-8"),
    (b'{"model":"\\ud800"}', "not valid JSON"),
    (b'{"model":"\\udc00 "}', "not valid JSON"),
    (b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    (b'{"messages":[{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}", "nested too deeply"),
    ('{"model":"x"}'.encode("utf-16"), "not valid JSON"),
    (b'\xef\xbb\xbf{"messages":[]}', "not valid JSON"),
    (b'"text"', "JSON object"),
    (b"null", "JSON object"),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE, "/tokenize", "/abort_request"])
async def test_bytes_that_are_no_json_object(server: Server, path: str) -> None:
    for data, part in RAW:
        status, answer = await server.post(path, data=data)
        error = nested(answer)
        assert status == 400, (data[:30], error)
        if path == CHAT:
            assert part in error["message"], (data[:30], error)


async def test_compressed_body_is_refused_untouched(server: Server) -> None:
    bomb = gzip.compress(bytes(10_000_000))
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    async with server.http.post(CHAT, data=bomb, headers=headers) as response:
        assert response.status == 415
        nested(await response.json())


async def test_oversized_body_is_refused_before_it_is_read(start: Start) -> None:
    server = await start(ServeConfig(max_body=2048))
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n{")
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413 ")
    writer.close()

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 1000

    async with server.http.post("/generate", data=chunks()) as response:
        assert response.status == 413
        assert nested(await response.json())["code"] == "request_too_large"


async def test_a_body_that_never_arrives(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.http.body.BODY_SECONDS", 0.02)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 408 ")
    writer.close()


async def test_any_content_type_is_read_as_json(server: Server) -> None:
    for kind in ("text/plain", "application/json; charset=utf-8", "application/x-www-form-urlencoded"):
        data = json.dumps(chat()).encode()
        async with server.http.post(CHAT, data=data, headers={"Content-Type": kind}) as response:
            assert response.status == 200


async def test_null_is_unset_and_unknown_fields_are_ignored(server: Server) -> None:
    body = dict.fromkeys(ChatBody.__struct_fields__) | {
        "messages": HI,
        "best_of": 1,
        "user": 5,
        "metadata": {"a": [1]},
    }
    await server.ask(CHAT, body)


async def test_duplicate_request_id(server: Server) -> None:
    server.engine.manual = True
    first = asyncio.create_task(server.post(COMPLETIONS, text(request_id="same")))
    await server.engine.started.wait()
    status, answer = await server.post(COMPLETIONS, text(request_id="same"))
    assert status == 400 and nested(answer)["param"] == "request_id"
    server.engine.abort(["same"])
    status, answer = await first
    assert status == 200 and answer["choices"][0]["finish_reason"] == "abort"


# -- anything at all ---------------------------------------------------------------------------------

FIELDS = sorted(
    {
        name
        for kind in (ChatBody, CompletionBody, NativeBody, NativeSampling)
        for name in kind.__struct_fields__
    }
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
    st.sampled_from(["user", "assistant", "text", "auto", "json_object", "org/tiny", "image_url"]),
)
NAMES = st.one_of(
    st.sampled_from([*FIELDS, "role", "content", "type", "function", "name"]), st.text(max_size=3)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=8,
)
BODIES = st.one_of(
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3).map(lambda d: {**d, "messages": HI}),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3).map(lambda d: {"prompt": [1, 2], **d}),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3).map(
        lambda d: {"text": "a", "sampling_params": d}
    ),
    VALUES,
)


def test_no_json_whatsoever_is_a_server_error() -> None:
    """Random bodies against all three generating routes over one server."""
    with asyncio.Runner() as loop:
        runner = Runner(make_app(service := Service({}), ServeConfig()))
        engine = FakeEngine()
        service.ready(make_loaded(CARD, ByteTokenizer(), JoinTemplate(), engine))
        loop.run(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        loop.run(site.start())
        port = runner.addresses[0][1]

        async def send(bodies: list[Any]) -> None:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
                for body in bodies:
                    data = json.dumps(body).encode()
                    for path in (CHAT, COMPLETIONS, GENERATE):
                        async with http.post(path, data=data) as response:
                            text = await response.text()
                            assert response.status < 500, (path, body, text)
                            if response.status >= 400:
                                nested(json.loads(text))
            assert not engine.live

        @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.lists(BODIES, min_size=1, max_size=5))
        def throw(bodies: list[Any]) -> None:
            loop.run(send(bodies))

        throw()
        loop.run(runner.cleanup())
