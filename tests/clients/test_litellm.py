"""LiteLLM, which sends explicit nulls and classifies errors by their message."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from core.errors import Overloaded
from tests.rigs.server import Server

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of pydantic and about unclosed sessions

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def litellm(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise it downloads one
    module = pytest.importorskip("litellm", reason="needs litellm")
    yield module
    await module.close_litellm_async_clients()
    module.in_memory_llm_clients_cache.flush_cache()


@pytest.fixture(params=["openai", "hosted_vllm"])
def complete(litellm: Any, server: Server, request: pytest.FixtureRequest) -> Any:
    """`acompletion` of the server's model, with both providers that fit this server."""
    return partial(
        litellm.acompletion,
        model=f"{request.param}/org/tiny",
        api_base=server.url + "/v1",
        api_key="none",
        messages=HI,
        num_retries=0,
        max_retries=0,
    )


async def test_chat(complete: Any) -> None:
    answer = await complete(temperature=0.5, stop=None, tools=None)
    assert answer.choices[0].message.content == "Hello wörld 😀!"
    assert answer.usage.completion_tokens == 5


async def test_stream(complete: Any) -> None:
    chunks = [chunk async for chunk in await complete(stream=True, stream_options={"include_usage": True})]
    # The chunk with the usage has no choices: since 1.110 LiteLLM hands it out as it comes.
    deltas = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(deltas) == "Hello wörld 😀!"
    assert [c.usage.completion_tokens for c in chunks if getattr(c, "usage", None)] == [5]


async def test_a_too_long_prompt_has_its_own_error(complete: Any, litellm: Any) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        await complete(messages=[{"role": "user", "content": "x" * 2000}])


async def test_errors_have_their_own_classes(complete: Any, litellm: Any, server: Server) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        await complete(temperature=-1)
    server.engine.refusal = Overloaded("full", 0.01)
    with pytest.raises(litellm.RateLimitError):
        await complete()


async def test_a_failure_in_a_stream_raises(complete: Any, litellm: Any, server: Server) -> None:
    server.engine.fail_at = 2
    with pytest.raises(litellm.exceptions.MidStreamFallbackError, match="device was lost"):
        async for _ in await complete(stream=True):
            pass
