"""cohere for Python. What goes over the wire is in `tests/app/test_http_cohere.py`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from core.errors import Unavailable
from tests.rigs.server import Server, know, refuse
from tests.rigs.tools import WEATHER

SAID = "Hello wörld 😀!"
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
    assert (answer.message.content[0].text, answer.finish_reason) == (SAID, "MAX_TOKENS")
    assert answer.usage.tokens.output_tokens == answer.usage.billed_units.output_tokens == 5
    assert answer.logprobs[0].token_ids == [ord("H")]
    stream = client.chat_stream(model="org/tiny", messages=HI, max_tokens=5, logprobs=True)
    told = [event async for event in stream]
    texts = [event.delta.message.content.text for event in told if event.type == "content-delta"]
    assert texts == ["Hel", "lo", " wörld", " 😀", "!"]
    assert told[0].id == told[-1].id and told[-1].delta.finish_reason == "MAX_TOKENS"
    assert told[-1].delta.usage.tokens.input_tokens == answer.usage.tokens.input_tokens


async def test_thinking_and_tools_go_round(client: Any, server: Server) -> None:
    know(server, "hermes", "think")
    server.engine.scripts = [CALL, CALL, ["Rain."]]
    asked: dict[str, Any] = {"model": "org/tiny", "tools": [WEATHER]}
    first = await client.chat(messages=HI, **asked)
    thinking, text = first.message.content
    assert (thinking.thinking, text.text, first.finish_reason) == ("hm", "Sure. ", "TOOL_CALL")
    call = first.message.tool_calls[0]
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Paris"}')
    told = [event async for event in client.chat_stream(messages=HI, **asked)]
    starts = [event.delta.message.tool_calls for event in told if event.type == "tool-call-start"]
    assert [start.function.name for start in starts] == ["weather"]
    given = [
        event.delta.message.tool_calls.function.arguments for event in told if event.type == "tool-call-delta"
    ]
    assert "".join(given) == '{"city": "Paris"}'
    document = {"type": "document", "document": {"data": {"sky": "grey"}}}
    result = {"role": "tool", "tool_call_id": call.id, "content": [document]}
    last = await client.chat(messages=[*HI, first.message, result], **asked)
    assert last.message.content[0].text == "Rain."
    assert 'assistant: Sure. \ntool: {"sky":"grey"}\n' in server.engine.runs[-1].job.prompt


async def test_errors(client: Any, cohere: Any, server: Server) -> None:
    with pytest.raises(cohere.BadRequestError) as bad:
        await client.chat(model="org/tiny", messages=HI, p=7.0)
    assert bad.value.body["message"].startswith("p ")
    with pytest.raises(cohere.NotFoundError):
        await client.chat(model="command", messages=HI)
    server.engine.fail_at = 2
    told = [event async for event in client.chat_stream(model="org/tiny", messages=HI)]
    assert (told[-1].delta.finish_reason, told[-1].delta.error) == ("ERROR", "The device was lost.")


async def test_a_busy_server_is_asked_again(client: Any, server: Server) -> None:
    coming = refuse(server, Unavailable("full"))
    answer = await client.chat(model="org/tiny", messages=HI, max_tokens=5)
    assert not coming and answer.message.content[0].text == SAID
