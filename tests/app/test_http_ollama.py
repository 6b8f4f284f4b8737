"""Ollama's routes: what its clients send and read."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from typing import Any

import pytest
from aiohttp import web

from app.api.ollama.routes import LINES
from app.http.keys import REQUEST_ID
from app.http.sse import EventStream
from core.config import ServeConfig
from tests.rigs.server import Server, Start, answered, know
from tests.rigs.tools import CALL, WEATHER

CHAT, GENERATE = "/api/chat", "/api/generate"
HI = [{"role": "user", "content": "hi"}]
SAID = "Hello wörld 😀!"
ANSWERED = ("<think>", "\n", "hm", "\n", "</think>", "\n\n", "Sure. ", *CALL)
STATISTICS = {"total_duration", "load_duration", "prompt_eval_duration", "eval_duration"}


async def ask(server: Server, path: str, body: dict[str, Any]) -> Any:
    return await server.ask(path, {"stream": False, **body})


async def lines(server: Server, path: str, body: dict[str, Any]) -> list[Any]:
    async with server.http.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "application/x-ndjson"
        return [json.loads(line) for line in (await response.read()).decode().splitlines()]


async def test_chat(server: Server) -> None:
    options = {
        "num_predict": 5,
        "temperature": 0.5,
        "seed": 3,
        "stop": ["X"],
        "repeat_penalty": 1.1,
        "num_ctx": 9,
    }
    body = {"model": "org/tiny:latest", "messages": HI, "options": options, "keep_alive": "5m"}
    answer = await ask(server, CHAT, body)
    assert (answer["model"], answer["done"], answer["done_reason"]) == ("org/tiny:latest", True, "stop")
    assert answer["message"] == {"role": "assistant", "content": SAID}
    job = server.engine.runs[-1].job
    assert job.prompt == "user: hi\nassistant: "
    assert (job.max_tokens, job.seed, job.text.stop) == (5, 3, ("X",))
    assert (job.sampling.temperature, job.sampling.repetition_penalty) == (0.5, 1.1)
    assert (answer["prompt_eval_count"], answer["eval_count"]) == (len(job.prompt), 5)
    assert all(isinstance(answer[name], int) and answer[name] >= 0 for name in STATISTICS)
    assert answer["created_at"].endswith("Z")
    assert (await ask(server, CHAT, {**body, "options": {"num_predict": 2}}))["done_reason"] == "length"
    await ask(server, CHAT, {**body, "options": {"num_predict": -1, "seed": -1}})
    assert server.engine.runs[-1].job.max_tokens is None and server.engine.runs[-1].job.seed is None


async def test_a_stream_is_lines_and_the_default(server: Server) -> None:
    told = await lines(server, CHAT, {"messages": HI, "options": {"num_predict": 5}})
    assert "".join(each["message"]["content"] for each in told) == SAID
    assert [each["done"] for each in told] == [False] * 5 + [True]
    assert told[-1]["eval_count"] == 5 and set(told[-1]) >= STATISTICS
    assert not STATISTICS & set(told[0])


async def test_thinking_and_tools(server: Server) -> None:
    know(server, "hermes", "think")
    server.engine.scripts = [[*ANSWERED], [*ANSWERED]]
    body = {"messages": HI, "tools": [WEATHER], "think": True}
    message = (await ask(server, CHAT, body))["message"]
    call = {"function": {"name": "weather", "arguments": {"city": "Ós </tool_call>lo"}}}
    assert message["thinking"] == "hm" and message["tool_calls"] == [call]
    assert message["content"].startswith("Sure.")
    assert "enable_thinking=True" in server.engine.runs[-1].job.prompt
    told = [each["message"] for each in await lines(server, CHAT, body)]
    assert "".join(each.get("thinking", "") for each in told) == "hm"
    assert [each["tool_calls"] for each in told if "tool_calls" in each] == [[call]]
    assert "".join(each["content"] for each in told) == message["content"]


async def test_a_call_that_is_cut_off_is_text(server: Server) -> None:
    know(server, "hermes")
    broken = ['<tool_call>\n{"name": "weather", "arguments": {"ci']
    for stream in (False, True):
        server.engine.scripts = [broken]
        body = {"messages": HI, "tools": [WEATHER], "stream": stream}
        told = await lines(server, CHAT, body) if stream else [await ask(server, CHAT, body)]
        assert not any("tool_calls" in each["message"] for each in told)
        assert "".join(each["message"]["content"] for each in told) == broken[0]


async def test_a_conversation_with_tools_goes_back_in(server: Server) -> None:
    messages = [
        *HI,
        {
            "role": "assistant",
            "content": "",
            "thinking": "hm",
            "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Paris"}}}],
        },
        {"role": "tool", "tool_name": "weather", "content": "sun"},
    ]
    await ask(server, CHAT, {"messages": messages})
    assert "tool: sun\n" in server.engine.runs[-1].job.prompt


async def test_generate(server: Server) -> None:
    answer = await ask(
        server, GENERATE, {"prompt": "a", "system": "Be brief.", "options": {"num_predict": 5}}
    )
    assert answer["response"] == SAID and "message" not in answer
    assert server.engine.runs[-1].job.prompt == "system: Be brief.\nuser: a\nassistant: "
    await ask(server, GENERATE, {"prompt": "a", "raw": True})
    assert server.engine.runs[-1].job.prompt == "a" and server.engine.runs[-1].job.max_tokens is None
    told = await lines(server, GENERATE, {"prompt": "a", "raw": True, "options": {"num_predict": 5}})
    assert "".join(each["response"] for each in told) == SAID and told[-1]["done"]


async def test_formats(server: Server) -> None:
    for wanted, kind in (("json", "json_object"), ({"type": "object"}, "json_schema"), ("", None)):
        await ask(server, CHAT, {"messages": HI, "format": wanted})
        grammar = server.engine.runs[-1].job.grammar
        assert (grammar.kind if grammar else None) == kind


async def test_nothing_to_say_loads_the_model(server: Server) -> None:
    for path, body in ((CHAT, {"messages": []}), (CHAT, {}), (GENERATE, {"prompt": ""}), (GENERATE, {})):
        answer = await ask(server, path, {"model": "org/tiny", **body})
        assert (answer["done"], answer["done_reason"]) == (True, "load")
    assert not server.engine.runs


async def test_what_there_is(server: Server) -> None:
    know(server, "hermes", "think")
    (model,) = (await server.get("/api/tags"))["models"]
    assert model["name"] == model["model"] == "org/tiny" and model["details"]["family"] == "llama"
    assert (model["details"]["format"], model["details"]["quantization_level"]) == ("safetensors", "float32")
    assert model["size"] == 1_000_000
    (loaded,) = (await server.get("/api/ps"))["models"]
    assert loaded["name"] == "org/tiny" and loaded["context_length"] == 512
    assert (loaded["size"], loaded["size_vram"]) == (1_000_000, 0)
    assert datetime.fromisoformat(loaded["expires_at"]).year > 2100
    shown = await ask(server, "/api/show", {"model": model["name"] + ":latest"})
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["model_info"]["llama.context_length"] == 512
    assert (await server.get("/api/version"))["version"]


@pytest.mark.parametrize(
    ("path", "body", "status", "word"),
    [
        (CHAT, {"messages": HI, "model": "llama"}, 404, "llama"),
        (CHAT, {"messages": "x"}, 400, "messages"),
        (CHAT, {"messages": [{"role": ""}]}, 400, "messages[0].role"),
        (CHAT, {"messages": [{**HI[0], "images": ["x"]}]}, 400, "messages[0].images"),
        (CHAT, {"messages": HI, "format": "xml"}, 400, "format"),
        (CHAT, {"messages": HI, "options": {"temperature": -1}}, 400, "options.temperature"),
        (CHAT, {"messages": HI, "options": {"repeat_penalty": -1}}, 400, "options.repeat_penalty"),
        (GENERATE, {"prompt": "a", "suffix": "b"}, 400, "suffix"),
        (GENERATE, {"prompt": "a", "images": ["b"]}, 400, "images"),
        ("/api/show", {"model": "llama"}, 404, "llama"),
        ("/api/pull", {"model": "llama"}, 404, "/api/pull"),
    ],
)
async def test_errors_are_texts(
    server: Server, path: str, body: dict[str, Any], status: int, word: str
) -> None:
    for streamed in (False, True):
        got, answer = await server.post(path, {**body, "stream": streamed})
        assert got == status and isinstance(answer["error"], str) and word in answer["error"], answer


async def test_a_key_is_asked_for(start: Start) -> None:
    server = await start(ServeConfig(api_key=("k",)))
    status, answer = await server.post(CHAT, {"messages": HI})
    assert status == 401 and isinstance(answer["error"], str)


async def test_a_failure_in_the_middle_is_a_line(server: Server) -> None:
    server.engine.fail_at = 2
    told = await lines(server, CHAT, {"messages": HI, "options": {"num_predict": 5}})
    assert set(told[-1]) == {"error"} and isinstance(told[-1]["error"], str)


async def test_silence_is_not_broken() -> None:
    """A comment or an empty line is no JSON, and an empty chunk is the end."""

    async def handler(request: web.Request) -> web.StreamResponse:
        request[REQUEST_ID] = "r"
        async with EventStream(request, keep_alive=0.001, dialect=LINES) as stream:
            asyncio.get_running_loop().call_later(0.02, stream.wake)
            await stream.wait()
            stream.write(b"{}\n")
        return stream.response

    async with answered(handler) as response:
        assert await response.read() == b"{}\n"
