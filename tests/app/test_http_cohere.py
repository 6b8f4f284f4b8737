"""Cohere's `/v2/chat`: the events byte by byte, messages in and out, errors in their shape."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from app.api.cohere.schema import chat_messages
from app.engine.job import Piece
from core.config import ServeConfig
from core.errors import Overloaded, Unavailable
from core.types import Finish, FinishReason
from tests.rigs.server import Server, Start, know
from tests.rigs.wait import until

URL, THEIRS = "/v2/chat", "/cohere/v2/chat"
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}
SAID = "Hello wörld 😀!"
CALL = ["Sure. ", '<tool_call>\n{"name": "add", "arg', 'uments": {"a"', ": 1}}\n</tool_call>"]
SCRIPT = ["<think>", "hm", "m</think>", *CALL]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "org/tiny", "max_tokens": 20, "messages": HI, **fields}


async def ask(server: Server, **fields: Any) -> dict[str, Any]:
    return await server.ask(URL, body(**fields))


async def events(server: Server, **fields: Any) -> list[dict[str, Any]]:
    *told, done = await server.events(URL, body(stream=True, **fields))
    assert done == "[DONE]"
    return [json.loads(event) for event in told]


def kinds(told: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in told]


# -- answers ---------------------------------------------------------------------------------------


async def test_the_stream_byte_by_byte(server: Server) -> None:
    know(server, "hermes", "think")
    server.engine.scripts = [SCRIPT]
    server.engine.cached = 4
    told = "\n".join(await server.events(THEIRS, body(stream=True, tools=[TOOL])))
    told = re.sub(r"chatcmpl-[0-9a-f]+", "x", told)
    told = re.sub(r"call_[0-9a-f]{8,}", "call_x", told)
    counts = f'{{"input_tokens":{len(server.prompt)},"output_tokens":7}}'
    content = '"delta":{"message":{"content":'
    call = '"delta":{"message":{"tool_calls":'
    expected = [
        '"message-start","id":"x","delta":{"message":{"role":"assistant"}}',
        f'"content-start","index":0,{content}{{"type":"thinking","thinking":""}}}}}}',
        f'"content-delta","index":0,{content}{{"thinking":"hm"}}}}}}',
        f'"content-delta","index":0,{content}{{"thinking":"m"}}}}}}',
        '"content-end","index":0',
        f'"content-start","index":1,{content}{{"type":"text","text":""}}}}}}',
        f'"content-delta","index":1,{content}{{"text":"Sure. "}}}}}}',
        '"content-end","index":1',
        f'"tool-call-start","index":0,{call}{{"id":"call_x","type":"function","function":'
        '{"name":"add","arguments":""}}}}',
        f'"tool-call-delta","index":0,{call}{{"function":{{"arguments":"{{\\"a\\""}}}}}}}}',
        f'"tool-call-delta","index":0,{call}{{"function":{{"arguments":": 1}}"}}}}}}}}',
        '"tool-call-end","index":0',
        '"message-end","id":"x","delta":{"finish_reason":"TOOL_CALL","usage":'
        f'{{"billed_units":{counts},"tokens":{counts},"cached_tokens":4}}}}',
    ]
    assert told == "\n".join([*(f'{{"type":{each}}}' for each in expected), "[DONE]"])


async def test_a_message(server: Server) -> None:
    answer = await ask(server, max_tokens=5)
    assert set(answer) == {"id", "finish_reason", "message", "usage"}
    assert answer["message"] == {"role": "assistant", "content": [{"type": "text", "text": SAID}]}
    assert answer["finish_reason"] == "MAX_TOKENS"
    counts = {"input_tokens": len(server.prompt), "output_tokens": 5}
    assert answer["usage"] == {"billed_units": counts, "tokens": counts, "cached_tokens": 0}
    told = await events(server, max_tokens=5)
    texts = [
        event["delta"]["message"]["content"]["text"] for event in told if "content-delta" in event["type"]
    ]
    assert texts == ["Hel", "lo", " wörld", " 😀", "!"]
    assert told[-1]["delta"] == {"finish_reason": "MAX_TOKENS", "usage": answer["usage"]}


async def test_how_it_ends(server: Server) -> None:
    async def ends(script: list[str], **fields: Any) -> str:
        server.engine.scripts = [script, script] if script else []
        reason = (await ask(server, **fields))["finish_reason"]
        assert (await events(server, **fields))[-1]["delta"]["finish_reason"] == reason
        return str(reason)

    assert await ends([], stop_sequences=["X"]) == "STOP_SEQUENCE"
    assert await ends(["Hi"]) == "COMPLETE"
    know(server)
    assert await ends(CALL, tools=[TOOL]) == "TOOL_CALL"
    assert (
        await ends(['<tool_call>\n{"name": "add", "arguments": {"a"', ": 1, b}}"], tools=[TOOL]) == "COMPLETE"
    )


async def test_thinking_and_tools(server: Server) -> None:
    know(server, "hermes", "think")
    server.engine.scripts = [SCRIPT]
    answer = await ask(server, tools=[TOOL])
    assert answer["message"]["content"] == [
        {"type": "thinking", "thinking": "hmm"},
        {"type": "text", "text": "Sure. "},
    ]
    (call,) = answer["message"]["tool_calls"]
    assert call == {
        "id": call["id"],
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 1}'},
    }


async def test_a_call_alone_has_no_block(server: Server) -> None:
    know(server)
    server.engine.scripts = [CALL[1:], CALL[1:]]
    assert "content" not in (await ask(server, tools=[TOOL]))["message"]
    assert "content-start" not in kinds(await events(server, tools=[TOOL]))


async def test_an_empty_answer_has_a_block(server: Server) -> None:
    server.engine.manual = True
    for streamed in (False, True):
        post = asyncio.ensure_future(events(server) if streamed else ask(server))
        await until(lambda: bool(server.engine.live))
        server.engine.runs[-1].push(0, Piece("", [], None, Finish(FinishReason.STOP)))
        got: Any = await post
        if streamed:
            assert kinds(got) == ["message-start", "content-start", "content-end", "message-end"]
        else:
            assert got["message"]["content"] == [{"type": "text", "text": ""}]


async def test_a_broken_call_ends(server: Server) -> None:
    know(server)
    server.engine.scripts = [['<tool_call>\n{"name": "add", "arguments": {"a"', ": 1, b}}"]]
    told = kinds(await events(server, tools=[TOOL]))
    assert told.count("tool-call-start") == told.count("tool-call-end")
    assert told.count("content-start") == told.count("content-end") > 0


async def test_log_probabilities(server: Server) -> None:
    """Every token in a whole answer; in a stream with the text that they make."""
    answer = await ask(server, max_tokens=5, logprobs=True)
    values = [-ord(word) / 100 for word in "Hl"]
    assert [item["token_ids"] for item in answer["logprobs"]][:2] == [[ord("H")], [ord("l")]]
    assert [item["logprobs"][0] for item in answer["logprobs"]][:2] == pytest.approx(values)
    assert answer["logprobs"][0]["text"] == "H"
    deltas = [e["logprobs"] for e in await events(server, max_tokens=5, logprobs=True) if "logprobs" in e]
    assert [id for item in deltas for id in item["token_ids"]] == [
        id for item in answer["logprobs"] for id in item["token_ids"]
    ]


# -- requests --------------------------------------------------------------------------------------


async def test_sampling_by_their_names(server: Server) -> None:
    await ask(
        server, k=3, p=0.9, temperature=0.5, seed=7, frequency_penalty=0.1, presence_penalty=0.2, priority=4
    )
    run = server.engine.runs[-1]
    assert (run.params.top_k, run.params.top_p, run.params.temperature) == (3, 0.9, 0.5)
    assert (run.params.frequency_penalty, run.params.presence_penalty) == (0.1, 0.2)
    assert (run.job.seed, run.job.priority) == (7, 4)


async def test_tools_go_round(server: Server) -> None:
    know(server)
    server.engine.scripts = [CALL, ["2"]]
    first = (await ask(server, tools=[TOOL]))["message"]
    id = first["tool_calls"][0]["id"]
    document = {"type": "document", "document": {"id": "1", "data": {"sum": 2}}}
    result = {"role": "tool", "tool_call_id": id, "content": [{"type": "text", "text": "two"}, document]}
    await ask(server, tools=[TOOL], messages=[*HI, first, result])
    assert server.prompt == 'tools: 1\nuser: hi\nassistant: Sure. \ntool: two\n{"sum":2}\nassistant: '


def test_what_an_assistant_said() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    blocks = [{"type": "thinking", "thinking": "a"}, {"type": "text", "text": "b"}]
    (made,) = chat_messages(
        [{"role": "assistant", "content": blocks, "tool_plan": "c", "tool_calls": [call], "citations": [{}]}]
    )
    assert made == {
        "role": "assistant",
        "content": "b",
        "tool_calls": [call],
        "reasoning_content": "ac",
        "reasoning": "ac",
    }


async def test_choosing_tools(server: Server) -> None:
    know(server)
    server.engine.scripts = [["x"]] * 4

    async def grammar(**fields: Any) -> Any:
        await ask(server, tools=[TOOL], **fields)
        found = server.engine.runs[-1].job.grammar
        return None if found is None else json.loads(found.text)["format"]

    assert await grammar() is None and server.prompt.startswith("tools: 1\n")
    assert (await grammar(tool_choice="REQUIRED"))["tags"]
    assert (await grammar(strict_tools=True))["tags"]
    assert await grammar(tool_choice="NONE") is None and not server.prompt.startswith("tools")


async def test_a_format_constrains(server: Server) -> None:
    async def grammar(**format: Any) -> Any:
        await ask(server, response_format=format)
        found = server.engine.runs[-1].job.grammar
        return None if found is None else (found.kind, found.text)

    assert await grammar(type="text") is None
    assert await grammar(type="json_object") == ("json_object", "")
    kind, text = await grammar(type="json_object", json_schema=SCHEMA)
    assert (kind, json.loads(text)) == ("json_schema", SCHEMA)


async def test_how_much_to_think(server: Server) -> None:
    know(server, None, "think")

    async def shown(**fields: Any) -> str:
        server.engine.scripts = [["Yes."]]
        await ask(server, **fields)
        return server.prompt

    assert "thinking" not in await shown()  # the model's own habit
    assert "enable_thinking=True" in await shown(thinking={"type": "enabled"})
    off = await shown(thinking={"type": "disabled"})
    assert "enable_thinking=False" in off and off.endswith("<think>\n\n</think>\n\n")
    server.engine.scripts = [["<think>", "a", "b", "c", "d"], ["Yes."]]
    answer = await ask(server, thinking={"type": "enabled", "token_budget": 2}, max_tokens=60)
    assert answer["message"]["content"][1] == {"type": "text", "text": "Yes."}
    know(server)  # one that does not think is not made to, and refuses nobody
    assert "thinking" not in await shown(thinking={"type": "enabled", "token_budget": 5})


async def test_what_templates_are_told(server: Server) -> None:
    documents = ["a", {"id": "1", "data": {"title": "b"}}, {"data": "c"}]
    await ask(server, documents=documents, safety_mode="STRICT", citation_options={"mode": "FAST"})
    flat = [{"text": "a"}, {"id": "1", "title": "b"}, {"text": "c"}]
    assert server.prompt == f"user: hi\ndocuments={flat}\nsafety_mode=STRICT\nassistant: "
    await ask(server, safety_mode="STRICT", chat_template_kwargs={"safety_mode": "OFF"})
    assert "safety_mode=OFF" in server.prompt


async def test_rendering_runs_nothing(server: Server) -> None:
    status, told = await server.post(THEIRS + "/render", body(k=3))
    assert status == 200 and not server.engine.runs
    await ask(server)
    assert told["prompt"] == server.prompt
    assert (told["sampling_params"]["top_k"], told["sampling_params"]["max_tokens"]) == (3, 20)


# -- errors ----------------------------------------------------------------------------------------


async def test_errors_name_their_fields(server: Server) -> None:
    know(server)
    picture = {"type": "image_url", "image_url": {"url": "x"}}
    for fields, where in (
        ({"max_tokens": -1}, "'max_tokens'"),
        ({"k": -5}, "k "),
        ({"p": 7.0}, "p "),
        ({"tool_choice": "AUTO"}, "'tool_choice'"),
        ({"thinking": {"type": "some"}}, "'thinking.type'"),
        ({"documents": [{}]}, "'documents[0].data'"),
        ({"messages": []}, "'messages'"),
        ({"messages": [{"role": "USER", "content": "hi"}]}, "'messages[0].role'"),
        ({"messages": [{"role": "user", "content": [picture]}]}, "'messages[0].content[0]'"),
        ({"messages": [{"role": "assistant", "content": [picture]}]}, "'messages[0].content[0].type'"),
        ({"response_format": {"type": "json_object", "json_schema": 1}}, "'response_format'"),
    ):
        async with server.http.post(URL, json=body(**fields)) as response:
            answer = await response.json()
            assert response.status == 400, (fields, answer)
            assert set(answer) == {"message", "id"} and answer["id"] == response.headers["X-Request-Id"]
            assert answer["message"].startswith(where), answer


async def test_every_error_on_these_paths_has_the_shape(server: Server, start: Start) -> None:
    async def fails(server: Server, method: str, path: str, status: int, sent: Any = None) -> None:
        async with server.http.request(method, path, json=sent) as response:
            assert response.status == status
            assert set(await response.json()) == {"message", "id"}

    await fails(server, "GET", URL, 405)
    await fails(server, "GET", "/cohere/v1/nothing", 404)
    await fails(server, "POST", THEIRS, 400)
    await fails(server, "POST", URL, 404, body(model="command"))
    await fails(await start(ServeConfig(api_key=("k",))), "POST", URL, 401, body())
    server.engine.refusal = Overloaded("full")
    await fails(server, "POST", URL, 429, body())
    server.engine.refusal = Unavailable("draining")
    await fails(server, "POST", URL, 503, body())
    server.engine.refusal = RuntimeError("a bug")
    await fails(server, "POST", URL, 500, body())
    async with server.http.get(URL + "ty") as response:  # another path is not Cohere's
        assert "error" in await response.json()


async def test_a_failure_mid_stream(server: Server) -> None:
    server.engine.fail_at = 2
    told = await events(server)
    assert told[-1] == {
        "type": "message-end",
        "delta": {"error": "The device was lost.", "finish_reason": "ERROR"},
    }
    assert "content-delta" in kinds(told)
