"""Anthropic's `/v1/messages`: the events byte by byte, and the official client against the server."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from aiohttp import web

from app.api.anthropic.events import DIALECT
from app.api.anthropic.input import chat_messages
from app.api.anthropic.schema import MessagesBody
from app.engine.job import Piece
from app.http.sse import EventStream
from core.config import ServeConfig
from core.errors import Overloaded, Unavailable
from core.types import Finish, FinishReason
from tests.rigs.engine import CONTEXT
from tests.rigs.server import Server, Start, answered, know
from tests.rigs.wait import until

URL = "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {}}}
TOOL = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
SAID = "Hello wörld 😀!"
CALL = ["Sure. ", '<tool_call>\n{"name": "add", "arg', 'uments": {"a"', ": 1}}\n</tool_call>"]
SCRIPT = ["<think>", "hm", "m</think>", *CALL]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "org/tiny", "max_tokens": 20, "messages": HI, **fields}


@pytest.fixture
def anthropic() -> Any:
    """The client's package. Importing it takes a second: where no test needs it nobody does."""
    return pytest.importorskip("anthropic", reason="the anthropic client is not installed")


@pytest.fixture
async def client(anthropic: Any, server: Server) -> AsyncIterator[Any]:
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


async def stream(server: Server, **fields: Any) -> str:
    async with server.http.post(URL, json=body(stream=True, **fields)) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"] == "text/event-stream"
        return (await response.read()).decode()


def events(text: str) -> list[dict[str, Any]]:
    found = re.findall(r"event: (.*)\ndata: (.*)\n\n", text)
    assert "".join(f"event: {name}\ndata: {data}\n\n" for name, data in found) == text
    made = [json.loads(data) for _, data in found]
    assert [event["type"] for event in made] == [name for name, _ in found]
    return made


# -- answers ---------------------------------------------------------------------------------------


async def test_the_stream_byte_by_byte(server: Server) -> None:
    know(server, "hermes", "think")
    server.engine.scripts = [SCRIPT]
    server.engine.cached = 4
    text = await stream(server, tools=[TOOL], thinking={"type": "adaptive"})
    text = re.sub(r"msg_[0-9a-f]+", "msg_x", text)
    text = re.sub(r"call_[0-9a-f]{8,}", "call_x", text)
    fresh = len(server.prompt) - 4
    counts = (
        f'"usage":{{"input_tokens":{fresh},"cache_creation_input_tokens":0,"cache_read_input_tokens":4,'
        '"cache_creation":{"ephemeral_5m_input_tokens":0,"ephemeral_1h_input_tokens":0},"output_tokens":'
    )
    details = '"output_tokens_details":{"thinking_tokens":1}'
    expected = [
        (
            "message_start",
            '"message":{"id":"msg_x","type":"message","role":"assistant","model":"org/tiny","content":[],'
            f'"stop_reason":null,"stop_sequence":null,{counts}1}}}}',
        ),
        ("content_block_start", '"index":0,"content_block":{"type":"thinking","thinking":"","signature":""}'),
        ("content_block_delta", '"index":0,"delta":{"type":"thinking_delta","thinking":"hm"}'),
        ("content_block_delta", '"index":0,"delta":{"type":"thinking_delta","thinking":"m"}'),
        ("content_block_delta", '"index":0,"delta":{"type":"signature_delta","signature":"msg_x"}'),
        ("content_block_stop", '"index":0'),
        ("content_block_start", '"index":1,"content_block":{"type":"text","text":""}'),
        ("content_block_delta", '"index":1,"delta":{"type":"text_delta","text":"Sure. "}'),
        ("content_block_stop", '"index":1'),
        (
            "content_block_start",
            '"index":2,"content_block":{"type":"tool_use","id":"call_x","name":"add","input":{}}',
        ),
        ("content_block_delta", '"index":2,"delta":{"type":"input_json_delta","partial_json":"{\\"a\\""}'),
        ("content_block_delta", '"index":2,"delta":{"type":"input_json_delta","partial_json":": 1}"}'),
        ("content_block_stop", '"index":2'),
        ("message_delta", f'"delta":{{"stop_reason":"tool_use","stop_sequence":null}},{counts}7,{details}}}'),
        ("message_stop", ""),
    ]
    frames = [
        f'event: {name}\ndata: {{"type":"{name}"{"," if fields else ""}{fields}}}\n\n'
        for name, fields in expected
    ]
    assert text == "".join(frames)


async def test_a_message(client: Any, server: Server) -> None:
    answer = await client.messages.create(**body(system="Be brief.", max_tokens=5))
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": SAID}]
    assert (answer.role, answer.type, answer.model) == ("assistant", "message", "org/tiny")
    assert answer.usage.output_tokens == 5 and answer.stop_reason == "max_tokens"
    assert server.prompt == "system: Be brief.\nuser: hi\nassistant: "


async def test_no_token_at_all_fills_the_cache(client: Any, server: Server) -> None:
    """Anthropic refused 0 until it gave it this meaning, and so did this server."""
    asked = body(max_tokens=0, cache_control={"type": "ephemeral"})
    answer = await client.messages.create(**asked)
    assert (answer.content, answer.stop_reason) == ([], "max_tokens")
    total = len(server.prompt)
    assert (answer.usage.output_tokens, answer.usage.cache_creation_input_tokens) == (0, total)
    assert server.engine.runs[-1].params.max_tokens == 0
    told = events(await stream(server, max_tokens=0))
    assert [event["type"] for event in told] == ["message_start", "message_delta", "message_stop"]
    assert told[1]["delta"]["stop_reason"] == "max_tokens"


async def test_how_it_ends(client: Any, server: Server) -> None:
    answer = await client.messages.create(**body(stop_sequences=["X"]))
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "X")
    server.engine.scripts = [["Hi"]]
    assert (await client.messages.create(**body())).stop_reason == "end_turn"
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 3}
    await client.messages.create(**body(), extra_body=sampling)
    params = server.engine.runs[-1].params
    assert {name: getattr(params, name) for name in sampling} == sampling


async def test_thinking_and_tools(client: Any, server: Server) -> None:
    know(server, "hermes", "think")
    server.engine.scripts = [SCRIPT, SCRIPT]
    asked = body(tools=[TOOL], thinking={"type": "adaptive"})
    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_message()
    for answer in (whole, final):
        thinking, text, call = answer.content
        assert (thinking.type, thinking.thinking, thinking.signature) == ("thinking", "hmm", answer.id)
        assert (text.type, text.text) == ("text", "Sure. ")
        assert (call.type, call.name, call.input) == ("tool_use", "add", {"a": 1})
        assert answer.stop_reason == "tool_use" and answer.usage.output_tokens == 7
    assert {"text", "thinking", "input_json", "message_stop"} <= set(kinds)


async def test_the_text_stream(client: Any) -> None:
    async with client.messages.stream(**body(max_tokens=5)) as stream:
        assert [text async for text in stream.text_stream] == ["Hel", "lo", " wörld", " 😀", "!"]


async def test_tools_go_round(client: Any, server: Server) -> None:
    know(server)
    server.engine.scripts = [CALL, ["2"]]
    first = await client.messages.create(**body(tools=[TOOL]))
    result = {
        "type": "tool_result",
        "tool_use_id": first.content[1].id,
        "content": [{"type": "text", "text": "two"}],
    }
    turn = {"role": "assistant", "content": [block.to_dict() for block in first.content]}
    more = {"role": "user", "content": [result, {"type": "text", "text": "go on"}]}
    await client.messages.create(**body(tools=[TOOL], messages=[*HI, turn, more]))
    assert server.prompt == "tools: 1\nuser: hi\nassistant: Sure. \ntool: two\nuser: go on\nassistant: "


async def test_choosing_tools(server: Server) -> None:
    know(server)
    server.engine.scripts = [["x"]] * 5
    own = {"type": "bash_20250124", "name": "bash"}
    tools = [TOOL, {**TOOL, "name": "other", "type": "custom", "cache_control": {"type": "ephemeral"}}, own]

    async def ask(**choice: Any) -> Any:
        await server.ask(URL, body(tools=tools, tool_choice=choice))
        grammar = server.engine.runs[-1].job.grammar
        return None if grammar is None else json.loads(grammar.text)["format"]

    assert await ask(type="auto") is None and server.prompt.startswith("tools: 2\n")
    assert len((await ask(type="any"))["tags"]) == 2
    named = await ask(type="tool", name="other")
    assert len(named["tags"]) == 1 and '"other"' in named["tags"][0]["begin"]
    assert (await ask(type="any", disable_parallel_tool_use=True))["stop_after_first"] is True
    assert await ask(type="none") is None and not server.prompt.startswith("tools")


async def test_how_much_to_think(server: Server) -> None:
    know(server, None, "think")

    async def ask(**fields: Any) -> str:
        server.engine.scripts = [["Yes."]]
        await server.ask(URL, body(**fields))
        return server.prompt

    assert "enable_thinking=False" in await ask()
    shown = await ask(thinking={"type": "disabled"})
    assert "enable_thinking=False" in shown and shown.endswith("<think>\n\n</think>\n\n")
    assert "enable_thinking=True" in await ask(thinking={"type": "enabled", "budget_tokens": 5})
    know(server)  # one that does not think is not made to, and refuses nobody
    assert "thinking" not in await ask(thinking={"type": "enabled", "budget_tokens": 5})


async def test_a_thinking_budget_cuts(server: Server) -> None:
    know(server, None, "think")
    server.engine.scripts = [["<think>", "a", "b", "c", "d"], ["Yes."]]
    _, answer = await server.post(URL, body(thinking={"type": "enabled", "budget_tokens": 2}, max_tokens=60))
    assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
    assert answer["content"][1]["text"] == "Yes."


async def test_an_answer_that_is_begun_goes_on(server: Server) -> None:
    await server.post(URL, body(messages=[*HI, {"role": "assistant", "content": "{"}]))
    assert server.prompt == "user: hi\nassistant: {"


async def test_a_format_constrains(server: Server) -> None:
    format = {"type": "json_schema", "schema": SCHEMA}
    for fields in ({"output_config": {"format": format, "effort": "low"}}, {"output_format": format}):
        status, _ = await server.post(URL, body(**fields))
        grammar = server.engine.runs[-1].job.grammar
        assert status == 200 and (grammar.kind, json.loads(grammar.text)) == ("json_schema", SCHEMA)


async def test_cache_use_is_told(client: Any, server: Server) -> None:
    server.engine.cached = 10
    marked = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    messages = [{"role": "user", "content": marked}]
    answer = await client.messages.create(**body(messages=messages))
    used, total = answer.usage, len(server.prompt)
    assert (used.cache_read_input_tokens, used.cache_creation_input_tokens) == (10, total - 10)
    assert used.input_tokens == 0
    assert used.cache_creation.ephemeral_1h_input_tokens == total - 10
    await client.messages.create(**body(cache_control={"type": "ephemeral"}))
    async with client.messages.stream(**body()) as stream:
        started = [event.message.usage async for event in stream if event.type == "message_start"]
    assert (started[0].input_tokens, started[0].cache_read_input_tokens) == (total - 10, 10)


async def test_counting(client: Any, server: Server) -> None:
    asked = {"model": "org/tiny", "messages": HI, "system": "Be brief.", "tools": [TOOL]}
    counted = await client.messages.count_tokens(**asked)
    assert not server.engine.runs
    know(server)
    answer = await client.messages.create(**asked, max_tokens=1)
    assert counted.input_tokens == answer.usage.input_tokens == len(server.prompt)


async def test_what_claude_code_sends(server: Server) -> None:
    """System blocks with a header that changes, cache marks, beta fields, nulls."""
    sent = body(
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=ab12c;"},
            {"type": "text", "text": "You are.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be brief."},
        ],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "another's"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "tool_use", "id": "t1", "name": "ls", "input": {}},
                    {"type": "tool_use", "id": "t2", "name": "ls", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "a", "is_error": False},
                    {"type": "tool_result", "tool_use_id": "t2", "cache_control": {"type": "ephemeral"}},
                    {
                        "type": "document",
                        "source": {"type": "text", "data": "doc", "media_type": "text/plain"},
                    },
                ],
            },
        ],
        metadata={"user_id": "u"},
        betas=["x"],
        context_management={"edits": []},
        service_tier="auto",
        thinking=None,
        temperature=None,
        stop_sequences=None,
        tool_choice=None,
        stream=None,
    )
    async with server.http.post(
        URL + "?beta=true", json=sent, headers={"anthropic-version": "x"}
    ) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Request-Id"] == response.headers["X-Request-Id"]
    assert server.prompt == (
        "system: You are.\nBe brief.\nuser: one\ntwo\nassistant: \ntool: a\ntool: \nuser: doc\nassistant: "
    )
    turn = chat_messages(msgspec.convert(sent, MessagesBody))[2]
    assert turn["reasoning_content"] == "hm"
    assert [call["function"]["arguments"] for call in turn["tool_calls"]] == [{}, {"a": 1}]


async def test_an_answer_is_cut_to_the_context(server: Server) -> None:
    """Claude Code asks for 32,000 tokens of every model."""
    answer = await server.ask(URL, body(max_tokens=32_000))
    assert answer["stop_reason"] == "model_context_window_exceeded"
    assert answer["usage"]["input_tokens"] + answer["usage"]["output_tokens"] == CONTEXT
    told = events(await stream(server, max_tokens=32_000))
    assert told[-2]["delta"]["stop_reason"] == "model_context_window_exceeded"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_does_not_fit_is_refused_in_the_words_on_which_claude_code_compacts(
    server: Server, stream: bool
) -> None:
    extra = len("user: \nassistant: ")
    for size, most in ((CONTEXT + 88, CONTEXT), (CONTEXT, CONTEXT - 1)):
        messages = [{**HI[0], "content": "x" * (size - extra)}]
        status, answer = await server.post(URL, body(messages=messages, stream=stream))
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert answer["error"]["message"] == f"prompt is too long: {size} tokens > {most} maximum"
    _, answer = await server.post("/v1/chat/completions", {"messages": messages})
    assert "maximum context length" in answer["error"]["message"]


async def test_blocks_nobody_knows_are_passed_over(server: Server) -> None:
    found = {"type": "search_result", "source": "s", "title": "T", "content": [{"type": "text", "text": "c"}]}
    result = [{"type": "tool_reference", "tool_name": "ls"}, {"type": "of_tomorrow"}, found]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "of_tomorrow", "text": 1}]},
        {
            "role": "assistant",
            "content": [
                {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}},
                {"type": "code_execution_tool_result", "tool_use_id": "s1", "content": {}},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "t1", "name": "find", "input": {}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": result}]},
    ]
    answer = await server.ask(URL, body(messages=messages))
    assert server.prompt == "user: a\nassistant: b\ntool: ls\nT\nc\nassistant: "
    silent = [{"role": "user", "content": [{"type": "of_tomorrow"}]}]
    mark = [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}]
    for fields in ({}, {"system": mark}):
        answer = await server.ask(URL, body(messages=silent, **fields))
    picture = {"type": "image", "source": {"type": "url", "url": "x"}}
    status, answer = await server.post(URL, body(messages=[{"role": "user", "content": [picture]}]))
    assert status == 400 and "messages[0].content[0]" in answer["error"]["message"]


async def test_a_conversation_is_not_held_here(server: Server) -> None:
    """Said by the code that makes clients send all of it."""
    status, answer = await server.post(URL, body(thread={"type": "create"}))
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert answer["error"]["details"]["error_code"] == "thread_unsupported_request"
    assert "compaction" in (await server.refused(URL, body(compaction={"type": "compact"})))["message"]


async def test_a_broken_call_is_not_a_call(server: Server) -> None:
    know(server)
    broken = ['<tool_call>\n{"name": "add", "arguments": {"a"', ": 1, b}}"]
    server.engine.scripts = [broken, broken]
    _, whole = await server.post(URL, body(tools=[TOOL]))
    assert [block["type"] for block in whole["content"]] == ["text"] and whole["stop_reason"] == "end_turn"
    told = events(await stream(server, tools=[TOOL]))
    assert told[-2]["delta"]["stop_reason"] == "end_turn"
    starts = [event["index"] for event in told if event["type"] == "content_block_start"]
    stops = [event["index"] for event in told if event["type"] == "content_block_stop"]
    assert starts == stops == list(range(len(starts)))


async def test_an_empty_answer_has_a_block(server: Server) -> None:
    server.engine.manual = True
    for streamed in (False, True):
        post = asyncio.ensure_future(stream(server) if streamed else server.post(URL, body()))
        await until(lambda: bool(server.engine.live))
        server.engine.runs[-1].push(0, Piece("", [], None, Finish(FinishReason.STOP)))
        got = await post
        if streamed:
            kinds = [event["type"] for event in events(got)]
            assert kinds == [
                "message_start",
                "content_block_start",
                "content_block_stop",
                "message_delta",
                "message_stop",
            ]
        else:
            assert got[1]["content"] == [{"type": "text", "text": ""}]


# -- errors ----------------------------------------------------------------------------------------


async def test_errors(client: Any, anthropic: Any, server: Server, start: Start) -> None:
    async def fails(kind: type[Exception], word: str, **fields: Any) -> None:
        for streamed in (False, True):
            with pytest.raises(kind) as raised:
                await client.messages.create(**{**body(**fields), "stream": streamed})
            assert raised.value.body["type"] == "error"
            assert raised.value.body["error"]["type"] == word
            assert raised.value.body["request_id"] == raised.value.response.headers["request-id"]

    await fails(anthropic.BadRequestError, "invalid_request_error", max_tokens=-1)
    await fails(
        anthropic.BadRequestError, "invalid_request_error", messages=[{**HI[0], "content": "x" * 600}]
    )
    await fails(anthropic.NotFoundError, "not_found_error", model="claude")
    server.engine.refusal = Overloaded("full")
    await fails(anthropic.RateLimitError, "rate_limit_error")
    server.engine.refusal = Unavailable("draining")
    await fails(anthropic.InternalServerError, "overloaded_error")
    server.engine.refusal = RuntimeError("a bug")
    await fails(anthropic.InternalServerError, "api_error")
    locked = await start(ServeConfig(api_key=("right",), max_body=2000))
    async with anthropic.AsyncAnthropic(base_url=locked.url, api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(anthropic.AuthenticationError) as refused:
            await stranger.messages.create(**body())
    assert refused.value.body["error"]["type"] == "authentication_error"
    async with anthropic.AsyncAnthropic(base_url=locked.url, api_key="right", max_retries=0) as friend:
        assert (await friend.messages.create(**body())).content
        with pytest.raises(anthropic.RequestTooLargeError) as large:
            await friend.messages.create(**body(messages=[{"role": "user", "content": "x" * 3000}]))
    assert large.value.body["error"]["type"] == "request_too_large"


async def test_every_error_on_these_paths_has_the_shape(server: Server) -> None:
    for method, path, status, kind in (
        ("GET", URL, 405, "invalid_request_error"),
        ("GET", URL + "/nothing", 404, "not_found_error"),
        ("POST", URL, 400, "invalid_request_error"),
        ("POST", URL + "/count_tokens", 400, "invalid_request_error"),
    ):
        async with server.http.request(method, path) as response:
            answer = await response.json()
            assert response.status == status
        assert answer["type"] == "error" and answer["error"]["type"] == kind
        assert answer["request_id"] == response.headers["request-id"]
    async with server.http.get(URL + "_else") as response:  # another path is not Anthropic's
        assert "type" not in await response.json()


async def test_a_failure_mid_stream(client: Any, anthropic: Any, server: Server) -> None:
    server.engine.fail_at = 2
    told = events(await stream(server))
    assert told[-1]["error"] == {"type": "api_error", "message": "The device was lost."}
    texts = []
    with pytest.raises(anthropic.APIStatusError, match="The device was lost"):
        async with client.messages.stream(**body()) as streamed:
            async for text in streamed.text_stream:
                texts.append(text)  # noqa: PERF401 -- what came before the failure counts
    assert texts == ["Hel", "lo"]
    with pytest.raises(anthropic.InternalServerError):
        await client.messages.create(**body())


async def test_a_client_that_goes_away_ends_the_run(server: Server) -> None:
    server.engine.manual = True
    async with server.http.post(URL, json=body(stream=True)) as response:
        run = server.engine.runs[0]
        run.push(0, Piece("x", [1]))
        await response.content.readuntil(b"\n\n")
        response.close()
    await until(lambda: run.aborted)


async def test_silence_is_filled_with_pings(server: Server) -> None:
    """Anthropic's clients know them; those of OpenAI's API would choke."""

    async def handler(request: web.Request) -> web.StreamResponse:
        async with EventStream(request, 0.01, DIALECT) as stream:
            await stream.wait()
        return stream.response

    async with answered(handler) as response:
        assert await response.content.readuntil(b"\n\n") == b'event: ping\ndata: {"type":"ping"}\n\n'


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": [], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "input": 5}]}]},
            "messages[0].content[0].input",
        ),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"name": "n n", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "n", "input_schema": 5}]}, "tools[0].input_schema"),
        ({"tools": [TOOL, {}]}, "tools[1].input_schema"),
        ({"tool_choice": {}}, "tool_choice.type"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled", "budget_tokens": 20}}, "max_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "some"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"top_p": 2}, "top_p"),
    ],
)
async def test_what_is_wrong_is_named(server: Server, fields: dict[str, Any], param: str) -> None:
    """Their shape has no field for the field's name, so the message must have it."""
    know(server)
    error = await server.refused(URL, body(**fields))
    assert error["type"] == "invalid_request_error"
    assert param in error["message"]
    assert not server.engine.runs
