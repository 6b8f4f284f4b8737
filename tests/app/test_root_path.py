"""A reverse proxy that shows the server under a prefix, whether it strips it or not."""

from __future__ import annotations

import pytest

from core.config import ServeConfig
from tests.rigs.server import Start

HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("given", ["/llm/v2", "llm/v2/"])
async def test_routes_answer_with_and_without_the_prefix(start: Start, given: str) -> None:
    server = await start(ServeConfig(root_path=given))
    for prefix in ("", "/llm/v2"):
        status, answer = await server.post(prefix + "/v1/chat/completions", {"messages": HI, "max_tokens": 1})
        assert status == 200 and answer["choices"]
        assert (await server.get(prefix + "/v1/models/org/tiny?x=1"))["id"] == "org/tiny"
        _, answer = await server.post(prefix + "/v1/messages", {"messages": HI})
        assert answer["type"] == "error", "in the shape of the route's own dialect"
    for wrong in ("/llm/v2x/health", "/llm/health", "/llm/v2/llm/v2/health"):
        async with server.http.get(wrong) as response:
            assert response.status == 404


async def test_the_prefix_opens_nothing(start: Start) -> None:
    server = await start(ServeConfig(root_path="/llm", api_key="secret"))
    for path, status in (("/llm/health", 200), ("/llm/v1/models", 401), ("/llm/health/x", 401)):
        async with server.http.get(path) as response:
            assert response.status == status, path


async def test_the_description_names_the_prefix(start: Start) -> None:
    for given, servers in (("/llm", [{"url": "/llm"}]), ("", None)):
        server = await start(ServeConfig(root_path=given))
        assert (await server.get("/openapi.json")).get("servers") == servers
