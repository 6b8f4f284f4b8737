"""LangChain's ChatOpenAI."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.rigs.server import Server, know

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of pydantic


@pytest.fixture
async def chat(server: Server) -> AsyncIterator[Any]:
    module = pytest.importorskip("langchain_openai", reason="needs langchain-openai")
    chat = module.ChatOpenAI(
        model="org/tiny", base_url=server.url + "/v1", api_key="none", max_retries=0, stream_usage=True
    )
    yield chat
    await chat.root_async_client.close()


async def test_invoke(chat: Any) -> None:
    answer = await chat.ainvoke([("system", "be brief"), ("human", "hi")])
    assert answer.content == "Hello wörld 😀!"
    assert answer.usage_metadata["output_tokens"] == 5
    assert answer.response_metadata["finish_reason"] == "length"


async def test_stream(chat: Any) -> None:
    chunks = [chunk async for chunk in chat.astream("hi")]
    assert "".join(chunk.content for chunk in chunks) == "Hello wörld 😀!"
    assert sum(c.usage_metadata["output_tokens"] for c in chunks if c.usage_metadata) == 5


async def test_structured_output(chat: Any, server: Server) -> None:
    schema = {
        "title": "Person",
        "description": "A person.",
        "type": "object",
        "properties": {"name": {"type": "string"}},
        "required": ["name"],
    }
    server.engine.scripts = [['{"name": ', '"Ada"}']]
    assert await chat.with_structured_output(schema, method="json_schema").ainvoke("who?") == {"name": "Ada"}
    assert "name" in str(server.engine.runs[0].job.grammar)


async def test_cached_tokens_are_reported(chat: Any, server: Server) -> None:
    server.engine.cached = 3
    answer = await chat.ainvoke("hi")
    assert answer.usage_metadata["input_token_details"]["cache_read"] == 3


async def test_tools(chat: Any, server: Server) -> None:
    know(server)
    add = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {"a": {}}}}
    call = ["Sure. ", '<tool_call>\n{"name": "add", "arg', 'uments": {"a"', ": 1}}\n</tool_call>"]
    server.engine.scripts = [call, call, ["2"]]
    bound = chat.bind_tools([add])
    whole = await bound.ainvoke("hi")
    parts = [part async for part in bound.astream("hi")]
    for answer in (whole, sum(parts[1:], parts[0])):
        assert [(one["name"], one["args"]) for one in answer.tool_calls] == [("add", {"a": 1})]
    messages = pytest.importorskip("langchain_core.messages")
    result = messages.ToolMessage("two", tool_call_id=whole.tool_calls[0]["id"])
    assert (await bound.ainvoke([("human", "hi"), whole, result])).content == "2"
    assert str(server.engine.runs[2].job.prompt).endswith("tool: two\nassistant: ")


async def test_a_failure_in_a_stream_raises(chat: Any, server: Server) -> None:
    server.engine.fail_at = 2
    with pytest.raises(openai.APIError, match="device was lost"):
        async for _ in chat.astream("hi"):
            pass
