"""LangChain's ChatOpenAI."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.app.conftest import Server

pytestmark = pytest.mark.filterwarnings("ignore")  # its own, of pydantic


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
        "description": "Somebody.",
        "type": "object",
        "properties": {"name": {"type": "string"}},
        "required": ["name"],
    }
    server.engine.scripts = [['{"name": ', '"Ada"}']]
    assert await chat.with_structured_output(schema, method="json_schema").ainvoke("who?") == {"name": "Ada"}
    assert "name" in str(server.engine.runs[0].job.grammar)


async def test_a_cached_share_is_told(chat: Any, server: Server) -> None:
    server.engine.cached = 3
    answer = await chat.ainvoke("hi")
    assert answer.usage_metadata["input_token_details"]["cache_read"] == 3
