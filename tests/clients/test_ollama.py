"""ollama for Python. The wire format is tested in `tests/app/test_http_ollama.py`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from app.engine.job import Piece
from tests.rigs.server import Server, know
from tests.rigs.tools import WEATHER
from tests.rigs.wait import until

TEXT = "Hello wörld 😀!"
HI: list[Any] = [{"role": "user", "content": "hi"}]
CALL = [
    "<think>hm</think>",
    "Sure. ",
    '<tool_call>\n{"name": "weather", "arg',
    'uments": {"city": "Paris"}}\n</tool_call>',
]
SHORT = {"num_predict": 5}


@pytest.fixture
def ollama() -> Any:
    return pytest.importorskip("ollama", reason="needs ollama")


@pytest.fixture
async def client(ollama: Any, server: Server) -> AsyncIterator[Any]:
    async with ollama.AsyncClient(host=server.url) as client:
        yield client


async def test_chat_and_stream(client: Any) -> None:
    answer = await client.chat("org/tiny", messages=HI, options=SHORT)
    assert (answer.message.content, answer.done, answer.eval_count) == (TEXT, True, 5)
    parts = [
        part async for part in await client.chat("org/tiny:latest", messages=HI, options=SHORT, stream=True)
    ]
    assert "".join(part.message.content for part in parts) == TEXT
    assert parts[-1].done and parts[-1].done_reason == "length"


async def test_thinking_and_tools(client: Any, server: Server) -> None:
    know(server, "hermes", "think")
    server.engine.scripts = [CALL, CALL, ["Fine."]]
    request = {"messages": HI, "tools": [WEATHER], "think": True}
    answer = await client.chat("org/tiny", **request)
    parts = [part async for part in await client.chat("org/tiny", stream=True, **request)]
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    for (call,) in (answer.message.tool_calls, calls):
        assert (call.function.name, call.function.arguments) == ("weather", {"city": "Paris"})
    assert answer.message.thinking == "".join(part.message.thinking or "" for part in parts) == "hm"
    result = {"role": "tool", "tool_name": "weather", "content": "sun"}
    answer = await client.chat("org/tiny", messages=[*HI, answer.message, result])
    assert answer.message.content == "Fine." and "tool: sun" in server.engine.runs[-1].job.prompt


async def test_generate_with_a_schema(client: Any, server: Server) -> None:
    answer = await client.generate("org/tiny", prompt="a", format={"type": "object"}, options=SHORT)
    assert answer.response == TEXT
    assert server.engine.runs[-1].job.grammar.kind == "json_schema"


async def test_list_and_show(client: Any) -> None:
    (model,) = (await client.list()).models
    shown = await client.show(model.model)
    assert model.model == "org/tiny" and shown.capabilities == ["completion"]


async def test_errors(client: Any, ollama: Any, server: Server) -> None:
    with pytest.raises(ollama.ResponseError, match="does not exist") as raised:
        await client.chat("llama", messages=HI)
    assert raised.value.status_code == 404
    server.engine.fail_at = 2
    with pytest.raises(ollama.ResponseError):
        async for _ in await client.chat("org/tiny", messages=HI, options=SHORT, stream=True):
            pass


async def test_a_disconnected_stream_is_aborted(client: Any, server: Server) -> None:
    server.engine.manual = True
    stream = await client.chat("org/tiny", messages=HI, stream=True)
    first = asyncio.ensure_future(anext(stream))
    await until(lambda: bool(server.engine.runs))
    server.engine.runs[0].push(0, Piece("x", [1]))
    assert (await first).message.content == "x"
    await stream.aclose()
    await until(lambda: server.engine.runs[0].aborted)
