"""anthropic for Python. The events themselves are in `tests/app/test_http_anthropic.py`."""

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

SAID = "Hello wörld 😀!"
HI: list[Any] = [{"role": "user", "content": "hi"}]
ASKED: dict[str, Any] = {"model": "org/tiny", "max_tokens": 20, "messages": HI}
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
    asked = {**ASKED, "max_tokens": 5}
    answer = await client.messages.create(**asked)
    assert (answer.content[0].text, answer.stop_reason) == (SAID, "max_tokens")
    async with client.messages.stream(**asked) as stream:
        assert "".join([text async for text in stream.text_stream]) == SAID
        final = await stream.get_final_message()
    assert final.usage.output_tokens == answer.usage.output_tokens == 5


async def test_parse(client: Any, server: Server) -> None:
    server.engine.scripts = [['{"name": "Ada", ', '"age": 36}']]
    answer = await client.messages.parse(**ASKED, output_format=Person)
    assert answer.parsed_output == Person(name="Ada", age=36)
    assert "age" in server.engine.runs[0].job.grammar.text


async def test_its_tool_runner_goes_round(anthropic: Any, client: Any, server: Server) -> None:
    """The client calls the tool itself and sends what came of it, until there is no more to call. It
    first asks the server to hold the conversation, and sends all of it once that was refused."""

    @anthropic.beta_async_tool
    async def add(a: int) -> str:
        """Adds one."""
        return str(a + 1)

    know(server)
    server.engine.scripts = [CALL, ["It is 2."]]
    last = await client.beta.messages.tool_runner(**ASKED, tools=[add]).until_done()
    assert last.content[0].text == "It is 2."
    assert str(server.engine.runs[1].job.prompt).endswith("assistant: Sure. \ntool: 2\nassistant: ")


async def test_beta(client: Any) -> None:
    """`?beta=true` and `anthropic-beta`, as Claude Code sends with every request."""
    asked = {**ASKED, "betas": ["context-1m-2025-08-07", "interleaved-thinking-2025-05-14"]}
    marked = [{"type": "text", "text": "You are.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    async with client.beta.messages.stream(**asked, system=marked) as stream:
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
async def test_a_refusal_is_tried_again(anthropic: Any, server: Server, error: Exception) -> None:
    coming = refuse(server, error)
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=1) as client:
        assert (await client.messages.create(**ASKED)).content
        assert not coming
        coming.append(error)
        with pytest.raises(anthropic.APIStatusError) as refused:
            await client.with_options(max_retries=0).messages.create(**ASKED)
    kind = "rate_limit_error" if isinstance(error, Overloaded) else "overloaded_error"
    assert refused.value.body["error"]["type"] == kind


async def test_a_stream_that_is_left_frees_its_row(client: Any, server: Server) -> None:
    server.engine.manual = True
    asked = asyncio.create_task(client.messages.create(**ASKED, stream=True))
    await until(lambda: bool(server.engine.runs))
    run = server.engine.runs[0]
    run.push(0, Piece("x", [1]))
    async with await asked as stream:
        await anext(aiter(stream))
    await until(lambda: run.aborted)
