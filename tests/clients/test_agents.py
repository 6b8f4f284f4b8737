"""Agent frameworks for Python: openai-agents, pydantic-ai and smolagents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from core.errors import Unavailable
from tests.rigs.server import Server, know, refuse

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of pydantic and httpx

HELLO = ["Hello", " there", "."]
TEXT = "Hello wörld 😀!"
CALL = ["Sure. ", '<tool_call>\n{"name": "add", "arg', 'uments": {"a"', ": 1}}\n</tool_call>"]


@pytest.fixture
async def client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    know(server)
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def add(a: int) -> str:
    """Adds one.

    Args:
        a: A number.
    """
    return f"sum {a + 1}"


# -- openai-agents ---------------------------------------------------------------------------------


@pytest.fixture(params=["chat", "responses"])
def agent(client: openai.AsyncOpenAI, request: pytest.FixtureRequest) -> Any:
    agents = pytest.importorskip("agents", reason="needs openai-agents")
    agents.set_tracing_disabled(True)
    kind = agents.OpenAIChatCompletionsModel if request.param == "chat" else agents.OpenAIResponsesModel
    return agents.Agent(
        name="a", model=kind(model="org/tiny", openai_client=client), tools=[agents.function_tool(add)]
    )


async def test_openai_agents(agent: Any, server: Server) -> None:
    agents = pytest.importorskip("agents")
    server.engine.scripts = [HELLO, HELLO, CALL, ["two"]]
    assert (await agents.Runner.run(agent, "hi")).final_output == "Hello there."
    streamed = agents.Runner.run_streamed(agent, "hi")
    raw = [event.data async for event in streamed.stream_events() if event.type == "raw_response_event"]
    deltas = [event.delta for event in raw if event.type == "response.output_text.delta"]
    assert deltas == HELLO and streamed.final_output == "Hello there."
    assert (await agents.Runner.run(agent, "hi")).final_output == "two"
    assert str(server.engine.runs[-1].job.prompt).endswith("tool: sum 2\nassistant: ")
    server.engine.fail_at = 1
    with pytest.raises(openai.InternalServerError, match="device was lost"):
        await agents.Runner.run(agent, "hi")


# -- pydantic-ai -----------------------------------------------------------------------------------


@pytest.fixture(params=["chat", "responses"])
def pydantic_agent(client: openai.AsyncOpenAI, request: pytest.FixtureRequest) -> Any:
    package = pytest.importorskip("pydantic_ai", reason="needs pydantic-ai-slim[openai]")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    kind = models.OpenAIChatModel if request.param == "chat" else models.OpenAIResponsesModel
    model = kind("org/tiny", provider=providers.OpenAIProvider(openai_client=client))
    return package.Agent(model, tools=[add])


async def test_pydantic_ai(pydantic_agent: Any, server: Server) -> None:
    errors = pytest.importorskip("pydantic_ai.exceptions")
    server.engine.scripts = [HELLO, HELLO, CALL, ["two"]]
    assert (await pydantic_agent.run("hi")).output == "Hello there."
    async with pydantic_agent.run_stream("hi") as streamed:
        texts = [text async for text in streamed.stream_text(delta=True, debounce_by=None)]
    assert texts == HELLO
    assert (await pydantic_agent.run("hi")).output == "two"
    assert str(server.engine.runs[-1].job.prompt).endswith("tool: sum 2\nassistant: ")
    refuse(server, Unavailable("The server is starting."))
    with pytest.raises(errors.ModelHTTPError) as rejected:
        await pydantic_agent.run("hi")
    assert rejected.value.status_code == 503


# -- smolagents ------------------------------------------------------------------------------------


async def test_smolagents(server: Server) -> None:
    smolagents = pytest.importorskip("smolagents", reason="needs smolagents[openai]")
    know(server)
    model = smolagents.OpenAIServerModel(
        model_id="org/tiny", api_base=server.url + "/v1", api_key="none", client_kwargs={"max_retries": 0}
    )
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert (await asyncio.to_thread(model.generate, messages)).content == TEXT
    pieces = await asyncio.to_thread(lambda: list(model.generate_stream(messages)))
    assert "".join(piece.content or "" for piece in pieces) == TEXT and len(pieces) > 1
    final = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "two"}}\n</tool_call>'
    server.engine.scripts = [CALL, [final]]
    monkey = pytest.MonkeyPatch()
    monkey.setattr("tests.rigs.engine.CONTEXT", 100_000)  # smolagents' system prompt is long
    try:
        agent = smolagents.ToolCallingAgent(tools=[smolagents.tool(add)], model=model, verbosity_level=0)
        assert await asyncio.to_thread(agent.run, "hi") == "two"
    finally:
        monkey.undo()
    assert "sum 2" in str(server.engine.runs[-1].job.prompt)
    server.engine.fail_at = 1
    with pytest.raises(openai.InternalServerError, match="device was lost"):
        await asyncio.to_thread(model.generate, messages)
