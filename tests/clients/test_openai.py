"""openai for Python: structured answers, tools in streams, retries.

Plain calls are tested in `tests/app/test_http_openai.py`, batches in `tests/app/test_batch_http.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pydantic
import pytest

from app.engine.job import Piece
from core.errors import Overloaded, Unavailable
from tests.rigs.server import Server, know, refuse
from tests.rigs.wait import PATIENCE, until

MODEL = "org/tiny"
HI: list[Any] = [{"role": "user", "content": "hi"}]
TEXT = "Hello wörld 😀!"
CALL = ["Sure. ", '<tool_call>\n{"name": "Add", "arg', 'uments": {"a"', ": 1}}\n</tool_call>"]


class Person(pydantic.BaseModel):
    """An answer."""

    name: str
    age: int


class Add(pydantic.BaseModel):
    """A tool."""

    a: int


@pytest.fixture
async def client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


# -- structured answers --------------------------------------------------------------------------------


async def test_parse(client: openai.AsyncOpenAI, server: Server) -> None:
    server.engine.scripts = [['{"name": "Ada", ', '"age": 36}']]
    answer = await client.chat.completions.parse(model=MODEL, messages=HI, response_format=Person)
    assert answer.choices[0].message.parsed == Person(name="Ada", age=36)
    assert json.loads(server.engine.runs[0].job.grammar.text)["required"] == ["name", "age"]


async def test_parse_in_a_stream(client: openai.AsyncOpenAI, server: Server) -> None:
    server.engine.scripts = [['{"name": "Ada", ', '"age": 36}']]
    async with client.chat.completions.stream(model=MODEL, messages=HI, response_format=Person) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == Person(name="Ada", age=36)
    assert {"chunk", "content.delta", "content.done"} <= set(kinds)


async def test_a_truncated_answer_raises(client: openai.AsyncOpenAI, server: Server) -> None:
    server.engine.scripts = [['{"name": "Ada", ', '"age": 36}']]
    with pytest.raises(openai.LengthFinishReasonError):
        await client.chat.completions.parse(
            model=MODEL, messages=HI, response_format=Person, max_completion_tokens=1
        )


async def test_parse_of_a_response(client: openai.AsyncOpenAI, server: Server) -> None:
    server.engine.scripts = [['{"name": "Ada", ', '"age": 36}']] * 2
    answer = await client.responses.parse(model=MODEL, input="who?", text_format=Person)
    assert answer.output_parsed == Person(name="Ada", age=36)
    async with client.responses.stream(model=MODEL, input="who?", text_format=Person) as stream:
        async for _ in stream:
            pass
        assert (await stream.get_final_response()).output_parsed == Person(name="Ada", age=36)


# -- tools ---------------------------------------------------------------------------------------------


async def test_tools_in_a_stream(client: openai.AsyncOpenAI, server: Server) -> None:
    """The client concatenates the arguments and parses them."""
    know(server)
    server.engine.scripts = [CALL]
    tools = [openai.pydantic_function_tool(Add)]
    async with client.chat.completions.stream(model=MODEL, messages=HI, tools=tools) as stream:
        done = [event async for event in stream if event.type == "tool_calls.function.arguments.done"]
        choice = (await stream.get_final_completion()).choices[0]
    assert [(event.name, event.parsed_arguments) for event in done] == [("Add", Add(a=1))]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Sure. ")
    assert [call.function.parsed_arguments for call in choice.message.tool_calls] == [Add(a=1)]


async def test_a_tool_result_is_sent_back(client: openai.AsyncOpenAI, server: Server) -> None:
    know(server)
    server.engine.scripts = [CALL, ["2"]]
    tools = [openai.pydantic_function_tool(Add)]
    first = (await client.chat.completions.create(model=MODEL, messages=HI, tools=tools)).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "two"}
    again = [*HI, first.model_dump(), result]  # with all its nulls
    answer = await client.chat.completions.create(model=MODEL, messages=again, tools=tools)
    assert answer.choices[0].message.content == "2"
    assert str(server.engine.runs[1].job.prompt).endswith("tool: two\nassistant: ")


# -- errors and retries ----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [Overloaded("full", 0.01), Unavailable("starting")])
async def test_429_and_503_are_retried(server: Server, error: Exception) -> None:
    errors = refuse(server, error)
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=1) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=HI)
        assert answer.choices[0].message.content == TEXT
        assert not errors
        errors.append(error)
        with pytest.raises(openai.APIStatusError) as rejected:
            once = client.with_options(max_retries=0)
            await once.chat.completions.create(model=MODEL, messages=HI, stream=True)
    assert int(rejected.value.response.headers["retry-after-ms"]) > 0
    assert not errors


async def test_an_internal_error_is_not_retried(server: Server) -> None:
    errors = refuse(server, RuntimeError("a bug"), RuntimeError("a bug"))
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=1) as client:
        with pytest.raises(openai.InternalServerError) as failed:
            await client.chat.completions.create(model=MODEL, messages=HI)
    assert "bug" not in failed.value.message
    assert len(errors) == 1


async def test_a_request_has_an_id(client: openai.AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(model=MODEL, messages=HI)
    assert raw.request_id == raw.headers["x-request-id"] and raw.parse().choices
    named = await client.models.with_raw_response.list(extra_headers={"X-Request-Id": "mine"})
    assert named.request_id == "mine"


async def test_a_disconnected_stream_is_aborted(client: openai.AsyncOpenAI, server: Server) -> None:
    server.engine.manual = True
    for n, create in enumerate((_chat, _responses)):
        task = asyncio.create_task(create(client))
        await until(lambda n=n: len(server.engine.runs) > n)
        run = server.engine.runs[n]
        run.push(0, Piece("x", [1]))
        async with await task as stream:
            await anext(aiter(stream))
        await until(lambda run=run: run.aborted)


def _chat(client: openai.AsyncOpenAI) -> Any:
    return client.chat.completions.create(model=MODEL, messages=HI, stream=True)


def _responses(client: openai.AsyncOpenAI) -> Any:
    return client.responses.create(model=MODEL, input="hi", stream=True, store=False)


async def test_a_timeout_of_the_client_aborts_the_request(client: openai.AsyncOpenAI, server: Server) -> None:
    server.engine.manual = True
    with pytest.raises(openai.APITimeoutError):
        await client.chat.completions.create(
            model=MODEL,
            messages=HI,
            timeout=openai.Timeout(PATIENCE, read=0.2),  # after the request is sent
        )
    await until(lambda: server.engine.runs[0].aborted)


async def test_the_blocking_client(server: Server) -> None:
    def complete() -> str:
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            stream = client.chat.completions.create(model=MODEL, messages=HI, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert await asyncio.to_thread(complete) == TEXT
