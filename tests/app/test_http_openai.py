"""The client that everybody uses, against the real server."""

from __future__ import annotations

import openai
import pytest

from core.config import ServeConfig
from core.errors import Overloaded, Unavailable
from tests.rigs.server import Server, Start

HI: list[dict[str, str]] = [{"role": "user", "content": "hi"}]


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["org/tiny"]
    assert (await client.models.retrieve("org/tiny")).object == "model"


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="org/tiny", messages=HI, logprobs=True, top_logprobs=2
    )
    assert answer.choices[0].message.content == "Hello wörld 😀!"
    assert answer.choices[0].logprobs.content[0].top_logprobs[1].token == "I"
    assert answer.usage.completion_tokens == 5


async def test_chat_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="org/tiny", messages=HI, stream=True, n=2, stream_options={"include_usage": True}
    )
    texts, reasons, usage = ["", ""], [None, None], None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == ["Hello wörld 😀!"] * 2
    assert reasons == ["length"] * 2
    assert usage.completion_tokens == 10


async def test_completions(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="org/tiny", prompt=["a", "b"], max_tokens=1, logprobs=1, echo=True
    )
    assert [choice.text for choice in answer.choices] == ["aHel", "bHel"]
    assert answer.choices[1].logprobs.tokens == ["<s>", "b", "H"]
    stream = await client.completions.create(model="org/tiny", prompt="a", max_tokens=2, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello"


async def test_errors(client: openai.AsyncOpenAI, server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="org/tiny", messages=HI, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        await client.chat.completions.create(
            model="org/tiny", messages=[{"role": "user", "content": "x" * 600}]
        )
    assert long.value.code == "context_length_exceeded"
    assert "This model's maximum context length is 512 tokens" in long.value.message
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="gpt-5", messages=HI)
    assert missing.value.code == "model_not_found"
    server.engine.refusal = Overloaded("full")
    with pytest.raises(openai.RateLimitError):
        await client.chat.completions.create(model="org/tiny", messages=HI)
    server.engine.refusal = Unavailable("draining")
    with pytest.raises(openai.InternalServerError) as away:
        await client.chat.completions.create(model="org/tiny", messages=HI)
    assert away.value.status_code == 503


async def test_failure_mid_stream_raises(client: openai.AsyncOpenAI, server: Server) -> None:
    server.engine.fail_at = 2
    stream = await client.chat.completions.create(model="org/tiny", messages=HI, stream=True)
    text = ""
    with pytest.raises(openai.APIError, match="The device was lost"):
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
    assert text == "Hello"


async def test_key(start: Start) -> None:
    server = await start(ServeConfig(api_key=("right",)))
    for key, fails in (("right", False), ("wrong", True)):
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0) as client:
            if fails:
                with pytest.raises(openai.AuthenticationError):
                    await client.models.list()
            else:
                await client.models.list()
