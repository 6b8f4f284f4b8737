"""anthropic for Python. The events are tested in `tests/app/test_http_anthropic.py`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pydantic
import pytest

from app.engine.job import Piece
from core.errors import Overloaded, Unavailable
from tests.rigs.server import Server, know, refuse
from tests.rigs.wait import until

TEXT = "Hello wörld 😀!"
HI: list[Any] = [{"role": "user", "content": "hi"}]
REQUEST: dict[str, Any] = {"model": "org/tiny", "max_tokens": 20, "messages": HI}
CALL = ["Sure. ", '<tool_call>\n{"name": "add", "arg', 'uments": {"a"', ": 1}}\n</tool_call>"]


class Person(pydantic.BaseModel):
    """An answer."""

    name: str
    age: int


@pytest.fixture
def anthropic() -> Any:
    return pytest.importorskip("anthropic", reason="needs anthropic")


@pytest.fixture
async def client(anthropic: Any, server: Server) -> AsyncIterator[Any]:
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


async def test_message_and_stream(client: Any) -> None:
    request = {**REQUEST, "max_tokens": 5}
    answer = await client.messages.create(**request)
    assert (answer.content[0].text, answer.stop_reason) == (TEXT, "max_tokens")
    async with client.messages.stream(**request) as stream:
        assert "".join([text async for text in stream.text_stream]) == TEXT
        final = await stream.get_final_message()
    assert final.usage.output_tokens == answer.usage.output_tokens == 5


async def test_parse(client: Any, server: Server) -> None:
    server.engine.scripts = [['{"name": "Ada", ', '"age": 36}']]
    answer = await client.messages.parse(**REQUEST, output_format=Person)
    assert answer.parsed_output == Person(name="Ada", age=36)
    assert "age" in server.engine.runs[0].job.grammar.text


async def test_the_tool_runner(anthropic: Any, client: Any, server: Server) -> None:
    """The client runs the tool and sends its result, until there are no more calls. It first requests a
    server-side conversation, and sends the whole conversation after the server has rejected that."""

    @anthropic.beta_async_tool
    async def add(a: int) -> str:
        """Adds one."""
        return str(a + 1)

    know(server)
    server.engine.scripts = [CALL, ["It is 2."]]
    last = await client.beta.messages.tool_runner(**REQUEST, tools=[add]).until_done()
    assert last.content[0].text == "It is 2."
    assert str(server.engine.runs[1].job.prompt).endswith("assistant: Sure. \ntool: 2\nassistant: ")


async def test_beta(client: Any) -> None:
    """`?beta=true` and `anthropic-beta`, as Claude Code sends with every request."""
    request = {**REQUEST, "betas": ["context-1m-2025-08-07", "interleaved-thinking-2025-05-14"]}
    marked = [{"type": "text", "text": "You are.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    async with client.beta.messages.stream(**request, system=marked) as stream:
        started = [event.message async for event in stream if event.type == "message_start"]
    used = started[0].usage
    assert used.cache_read_input_tokens == 0
    counted = await client.beta.messages.count_tokens(
        model="org/tiny", messages=HI, system=marked, betas=["token-counting-2024-11-01"]
    )
    assert counted.input_tokens == used.input_tokens + used.cache_creation_input_tokens


async def test_models(client: Any) -> None:
    assert [model.id async for model in client.models.list()] == ["org/tiny"]
    model = await client.models.retrieve("org/tiny")
    assert (model.id, model.type, model.created_at.year) == ("org/tiny", "model", 2023)


@pytest.mark.parametrize("error", [Overloaded("full", 0.01), Unavailable("starting")])
async def test_429_and_503_are_retried(anthropic: Any, server: Server, error: Exception) -> None:
    errors = refuse(server, error)
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=1) as client:
        assert (await client.messages.create(**REQUEST)).content
        assert not errors
        errors.append(error)
        with pytest.raises(anthropic.APIStatusError) as rejected:
            await client.with_options(max_retries=0).messages.create(**REQUEST)
    kind = "rate_limit_error" if isinstance(error, Overloaded) else "overloaded_error"
    assert rejected.value.body["error"]["type"] == kind


async def test_a_disconnected_stream_is_aborted(client: Any, server: Server) -> None:
    server.engine.manual = True
    task = asyncio.create_task(client.messages.create(**REQUEST, stream=True))
    await until(lambda: bool(server.engine.runs))
    run = server.engine.runs[0]
    run.push(0, Piece("x", [1]))
    async with await task as stream:
        await anext(aiter(stream))
    await until(lambda: run.aborted)
