"""cohere for Python. The wire format is tested in `tests/app/test_http_cohere.py`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from core.errors import Unavailable
from tests.rigs.server import Server, know, refuse
from tests.rigs.tools import WEATHER

TEXT = "Hello wörld 😀!"
HI: list[Any] = [{"role": "user", "content": "hi"}]
CALL = [
    "<think>hm</think>",
    "Sure. ",
    '<tool_call>\n{"name": "weather", "arg',
    'uments": {"city": "Paris"}}\n</tool_call>',
]


@pytest.fixture
def cohere() -> Any:
    return pytest.importorskip("cohere", reason="needs cohere")


@pytest.fixture(params=["", "/cohere"])
async def client(cohere: Any, server: Server, request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    async with cohere.AsyncClientV2("none", base_url=server.url + request.param) as client:
        yield client


async def test_chat_and_stream(client: Any, server: Server) -> None:
    answer = await client.chat(model="org/tiny", messages=HI, max_tokens=5, logprobs=True)
    assert (answer.message.content[0].text, answer.finish_reason) == (TEXT, "MAX_TOKENS")
    assert answer.usage.tokens.output_tokens == answer.usage.billed_units.output_tokens == 5
    assert answer.logprobs[0].token_ids == [ord("H")]
    stream = client.chat_stream(model="org/tiny", messages=HI, max_tokens=5, logprobs=True)
    events = [event async for event in stream]
    texts = [event.delta.message.content.text for event in events if event.type == "content-delta"]
    assert texts == ["Hel", "lo", " wörld", " 😀", "!"]
    assert events[0].id == events[-1].id and events[-1].delta.finish_reason == "MAX_TOKENS"
    assert events[-1].delta.usage.tokens.input_tokens == answer.usage.tokens.input_tokens


async def test_thinking_and_tools(client: Any, server: Server) -> None:
    know(server, "hermes", "think")
    server.engine.scripts = [CALL, CALL, ["Rain."]]
    request: dict[str, Any] = {"model": "org/tiny", "tools": [WEATHER]}
    first = await client.chat(messages=HI, **request)
    thinking, text = first.message.content
    assert (thinking.thinking, text.text, first.finish_reason) == ("hm", "Sure. ", "TOOL_CALL")
    call = first.message.tool_calls[0]
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Paris"}')
    events = [event async for event in client.chat_stream(messages=HI, **request)]
    starts = [event.delta.message.tool_calls for event in events if event.type == "tool-call-start"]
    assert [start.function.name for start in starts] == ["weather"]
    arguments = [
        event.delta.message.tool_calls.function.arguments
        for event in events
        if event.type == "tool-call-delta"
    ]
    assert "".join(arguments) == '{"city": "Paris"}'
    document = {"type": "document", "document": {"data": {"sky": "grey"}}}
    result = {"role": "tool", "tool_call_id": call.id, "content": [document]}
    last = await client.chat(messages=[*HI, first.message, result], **request)
    assert last.message.content[0].text == "Rain."
    assert 'assistant: Sure. \ntool: {"sky":"grey"}\n' in server.engine.runs[-1].job.prompt


async def test_errors(client: Any, cohere: Any, server: Server) -> None:
    with pytest.raises(cohere.BadRequestError) as bad:
        await client.chat(model="org/tiny", messages=HI, p=7.0)
    assert bad.value.body["message"].startswith("p ")
    with pytest.raises(cohere.NotFoundError):
        await client.chat(model="command", messages=HI)
    server.engine.fail_at = 2
    events = [event async for event in client.chat_stream(model="org/tiny", messages=HI)]
    assert (events[-1].delta.finish_reason, events[-1].delta.error) == ("ERROR", "The device was lost.")


async def test_503_is_retried(client: Any, server: Server) -> None:
    errors = refuse(server, Unavailable("full"))
    answer = await client.chat(model="org/tiny", messages=HI, max_tokens=5)
    assert not errors and answer.message.content[0].text == TEXT
