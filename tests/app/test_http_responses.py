"""`/v1/responses`: the events byte by byte, and the official client against the real server."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import openai
import pytest

from app.api.responses.input import messages, own_items, shortened
from core.config import ServeConfig
from core.errors import Overloaded
from tests.rigs.responses import SCRIPT, URL, events, frames
from tests.rigs.server import Server, Start, know
from tests.rigs.wait import until

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}
SAID = "Hello wörld 😀!"


@pytest.fixture
async def server(start: Start, tmp_path: Path) -> Server:
    return await start(ServeConfig(data_dir=str(tmp_path)))


# -- streams ---------------------------------------------------------------------------------------


async def test_the_stream_byte_by_byte(server: Server) -> None:
    know(server, "hermes", "think")
    server.engine.scripts = [SCRIPT]
    async with server.http.post(URL, json={"input": "hi", "stream": True, "tools": [TOOL]}) as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        text = (await response.read()).decode()
    text = re.sub(r'"response":\{.*\}(?=,"sequence_number")', '"response":{}', text)
    text = re.sub(r"_[0-9a-f]{32}o", "_o", text)
    text = re.sub(r"call_[0-9a-f]{8,}", "call_x", text)
    told = re.findall(r"event: (.*)\ndata: (.*)\n\n", text)
    assert "".join(f"event: {name}\ndata: {data}\n\n" for name, data in told) == text
    at = '"item_id":"rs_o0","output_index":0,"content_index":0'
    said = '"item_id":"msg_o1","output_index":1,"content_index":0'
    call = '"id":"fc_o2","type":"function_call","status":'
    empty = '{"type":"output_text","text":"","annotations":[],"logprobs":[]}'
    sure = '{"type":"output_text","text":"Sure. ","annotations":[],"logprobs":[]}'
    expected = [
        ("created", '"response":{}'),
        ("in_progress", '"response":{}'),
        (
            "output_item.added",
            '"output_index":0,"item":{"id":"rs_o0","type":"reasoning","status":"in_progress",'
            '"content":[],"summary":[]}',
        ),
        ("content_part.added", f'{at},"part":{{"type":"reasoning_text","text":""}}'),
        ("reasoning_text.delta", f'{at},"delta":"hm"'),
        ("reasoning_text.delta", f'{at},"delta":"m"'),
        ("reasoning_text.done", f'{at},"text":"hmm"'),
        ("content_part.done", f'{at},"part":{{"type":"reasoning_text","text":"hmm"}}'),
        (
            "output_item.done",
            '"output_index":0,"item":{"id":"rs_o0","type":"reasoning","status":"completed",'
            '"content":[{"type":"reasoning_text","text":"hmm"}],"summary":[]}',
        ),
        (
            "output_item.added",
            '"output_index":1,"item":{"id":"msg_o1","type":"message","status":"in_progress",'
            '"content":[],"role":"assistant"}',
        ),
        ("content_part.added", f'{said},"part":{empty}'),
        ("output_text.delta", f'{said},"logprobs":[],"delta":"Sure. "'),
        ("output_text.done", f'{said},"text":"Sure. ","logprobs":[]'),
        ("content_part.done", f'{said},"part":{sure}'),
        (
            "output_item.done",
            '"output_index":1,"item":{"id":"msg_o1","type":"message","status":"completed",'
            f'"content":[{sure}],"role":"assistant"}}',
        ),
        (
            "output_item.added",
            f'"output_index":2,"item":{{{call}"in_progress","call_id":"call_x","name":"add","arguments":""}}',
        ),
        ("function_call_arguments.delta", '"item_id":"fc_o2","output_index":2,"delta":"{\\"a\\""'),
        ("function_call_arguments.delta", '"item_id":"fc_o2","output_index":2,"delta":": 1}"'),
        (
            "function_call_arguments.done",
            '"item_id":"fc_o2","output_index":2,"arguments":"{\\"a\\": 1}","name":"add"',
        ),
        (
            "output_item.done",
            f'"output_index":2,"item":{{{call}"completed","call_id":"call_x","name":"add",'
            '"arguments":"{\\"a\\": 1}"}',
        ),
        ("completed", '"response":{}'),
    ]
    for number, (name, fields) in enumerate(expected):
        type_ = f"response.{name}"
        assert told[number] == (type_, f'{{"type":"{type_}",{fields},"sequence_number":{number}}}')
    assert len(told) == len(expected)


async def test_the_stream_tells_what_is_stored(server: Server) -> None:
    know(server, "hermes", "think")
    server.engine.scripts = [SCRIPT, SCRIPT]
    server.engine.cached = 3
    body = {"input": "hi", "tools": [TOOL]}
    told = events(await frames(server, "POST", URL, {**body, "stream": True}))
    assert told[0]["response"]["status"] == "in_progress" and told[0]["response"]["usage"] is None
    last = told[-1]["response"]
    assert await server.get(f"{URL}/{last['id']}") == last
    _, whole = await server.post(URL, body)
    usage = {
        "input_tokens": len(server.prompt),
        "input_tokens_details": {"cached_tokens": 3},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": len(server.prompt) + 7,
    }
    assert whole["usage"] == last["usage"] == usage
    kinds = [item["type"] for item in whole["output"]]
    assert kinds == [item["type"] for item in last["output"]] == ["reasoning", "message", "function_call"]
    assert {key: type(value) for key, value in whole.items()} == {k: type(v) for k, v in last.items()}


async def test_the_stream_helper(client: openai.AsyncOpenAI, server: Server) -> None:
    know(server, "hermes", "think")
    server.engine.scripts = [SCRIPT]
    async with client.responses.stream(model="org/tiny", input="hi", tools=[TOOL]) as stream:
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert final.output_text == "".join(deltas) == "Sure. "
    assert final.output[0].content[0].text == "hmm"
    assert (final.output[2].name, json.loads(final.output[2].arguments)) == ("add", {"a": 1})


async def test_a_broken_call_is_not_a_call(server: Server) -> None:
    know(server)
    broken = ['<tool_call>\n{"name": "add", "arguments": {"a"', ": 1, b}}"]
    server.engine.scripts = [broken, broken]
    told = events(await frames(server, "POST", URL, {"input": "hi", "tools": [TOOL], "stream": True}))
    streamed = told[-1]["response"]["output"]
    assert [item["status"] for item in streamed if item["type"] == "function_call"] in ([], ["incomplete"])
    _, whole = await server.post(URL, {"input": "hi", "tools": [TOOL]})
    assert [item["type"] for item in whole["output"]] == ["message"]
    assert whole["output"][0]["content"][0]["text"].startswith("<tool_call>")


async def test_a_failure_ends_the_stream_with_an_event(server: Server) -> None:
    server.engine.fail_at = 2
    told = events(await frames(server, "POST", URL, {"input": "hi", "stream": True}))
    assert told[-1]["type"] == "response.failed"
    failed = told[-1]["response"]
    assert failed["error"] == {"code": "engine_failed", "message": "The device was lost."}
    assert failed["output"][0]["content"][0]["text"] == "Hello"
    status, body = await server.post(URL, {"input": "hi"})
    assert status == 500 and body["error"]["code"] == "engine_failed"


async def test_too_long_is_incomplete(client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(model="org/tiny", input="hi", max_output_tokens=2)
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output_text == "Hello"
    stream = await client.responses.create(model="org/tiny", input="hi", max_output_tokens=2, stream=True)
    assert [event.type async for event in stream][-1] == "response.incomplete"


async def test_a_client_that_goes_away_ends_the_run(server: Server) -> None:
    server.engine.manual = True
    async with server.http.post(URL, json={"input": "hi", "stream": True}) as response:
        await response.content.readuntil(b"\n\n")
        run = server.engine.runs[0]
        response.close()
    await until(lambda: run.aborted)


# -- the client ------------------------------------------------------------------------------------


async def test_create_retrieve_delete(client: openai.AsyncOpenAI) -> None:
    made = await client.responses.create(model="org/tiny", input="hi", user="u", metadata={"k": "v"})
    made_text = made.output_text
    assert made_text.startswith("Hello") and made.metadata == {"k": "v"} and made.store is True
    assert (await client.responses.retrieve(made.id)).to_dict() == made.to_dict()
    items = [item async for item in client.responses.input_items.list(made.id)]
    assert [item.content[0].text for item in items] == ["hi"]
    await client.responses.delete(made.id)
    for gone in (client.responses.retrieve(made.id), client.responses.delete(made.id)):
        with pytest.raises(openai.NotFoundError, match="not found"):
            await gone


async def test_a_conversation(
    client: openai.AsyncOpenAI, server: Server, start: Start, tmp_path: Path
) -> None:
    first = await client.responses.create(model="org/tiny", input="one", instructions="Be brief.")
    second = await client.responses.create(
        model="org/tiny", input=[{"role": "user", "content": "two"}], previous_response_id=first.id
    )
    assert second.previous_response_id == first.id
    # Instructions hold for one answer only.
    assert server.prompt == f"user: one\nassistant: {SAID}\nuser: two\nassistant: "
    again = await start(ServeConfig(data_dir=str(tmp_path)))
    async with openai.AsyncOpenAI(base_url=again.url + "/v1", api_key="none", max_retries=0) as other:
        await other.responses.create(model="org/tiny", input="three", previous_response_id=second.id)
    assert again.prompt == (
        f"user: one\nassistant: {SAID}\nuser: two\nassistant: {SAID}\nuser: three\nassistant: "
    )


async def test_a_stream_can_be_built_on_as_soon_as_it_says_so(
    client: openai.AsyncOpenAI, server: Server
) -> None:
    stream = await client.responses.create(model="org/tiny", input="one", stream=True)
    async for event in stream:
        if event.type == "response.incomplete":
            await client.responses.create(
                model="org/tiny", input="two", previous_response_id=event.response.id
            )
    assert server.prompt.startswith(f"user: one\nassistant: {SAID}")


async def test_another_key_sees_nothing(start: Start, tmp_path: Path) -> None:
    server = await start(ServeConfig(api_key=("one", "other"), data_dir=str(tmp_path)))
    client = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="one", max_retries=0)
    made = await client.responses.create(model="org/tiny", input="hi")
    other = client.with_options(api_key="other")
    for ask in (
        other.responses.retrieve(made.id),
        other.responses.cancel(made.id),
        other.responses.delete(made.id),
    ):
        with pytest.raises(openai.NotFoundError):
            await ask
    with pytest.raises(openai.BadRequestError, match="not found"):
        await other.responses.create(model="org/tiny", input="hi", previous_response_id=made.id)
    await client.close()


async def test_not_stored(client: openai.AsyncOpenAI, start: Start, tmp_path: Path) -> None:
    made = await client.responses.create(model="org/tiny", input="hi", store=False)
    assert made.store is False
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(made.id)
    none = await start(ServeConfig(data_dir=str(tmp_path / "none"), response_store=0))
    status, body = await none.post(URL, {"input": "hi"})
    assert status == 200 and body["store"] is False
    status, body = await none.post(URL, {"input": "hi", "background": True})
    assert status == 400 and body["error"]["param"] == "store"
    assert not (tmp_path / "none").exists()


async def test_a_disk_that_refuses_costs_no_answer(start: Start, tmp_path: Path) -> None:
    server = await start(ServeConfig(data_dir=str(tmp_path / "file")))
    (tmp_path / "file").write_text("")
    status, body = await server.post(URL, {"input": "hi"})
    assert status == 200 and body["store"] is False
    status, _ = await server.post(URL, {"input": "hi", "background": True})
    assert status == 503
    await until(lambda: not server.engine.live)


async def test_tools_go_round(client: openai.AsyncOpenAI, server: Server) -> None:
    know(server)
    server.engine.scripts = [['<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'], ["2"]] * 2
    asked = await client.responses.create(model="org/tiny", input="one and one?", tools=[TOOL])
    call = asked.output[0]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "two"}
    told = await client.responses.create(
        model="org/tiny", input=[result], previous_response_id=asked.id, tools=[TOOL]
    )
    shown = server.prompt
    assert told.output_text == "2"
    assert shown.endswith("user: one and one?\nassistant: \ntool: two\nassistant: ")
    # The same without the store: the client sends everything.
    asked = await client.responses.create(model="org/tiny", input="one and one?", tools=[TOOL], store=False)
    sent = [{"role": "user", "content": "one and one?"}, asked.output[0].to_dict(), result]
    await client.responses.create(model="org/tiny", input=sent, tools=[TOOL], store=False)
    assert server.prompt == shown


async def test_choosing_a_tool(server: Server) -> None:
    know(server)
    server.engine.scripts = [["x"]] * 3
    other = {**TOOL, "name": "other"}
    body = {
        "input": "hi",
        "tools": [TOOL, other, {"type": "web_search"}, {"type": "custom", "name": "patch"}],
    }
    await server.post(URL, {**body, "tool_choice": {"type": "function", "name": "other"}})
    grammar = server.engine.runs[-1].job.grammar
    (tag,) = json.loads(grammar.text)["format"]["tags"]
    assert '"other"' in tag["begin"]
    allowed = [{"type": "function", "name": "add"}, {"type": "web_search"}]
    await server.post(
        URL, {**body, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": allowed}}
    )
    assert server.prompt.startswith("tools: 1\n")
    await server.post(URL, {**body, "tool_choice": "none"})
    assert not server.prompt.startswith("tools")


async def test_a_format_constrains(client: openai.AsyncOpenAI, server: Server) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    format = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    answer = await client.responses.create(model="org/tiny", input="hi", text={"format": format})
    grammar = server.engine.runs[-1].job.grammar
    assert (grammar.kind, json.loads(grammar.text)) == ("json_schema", schema)
    assert answer.text.format.name == "n"
    await client.responses.create(model="org/tiny", input="hi", text={"format": {"type": "json_object"}})
    assert server.engine.runs[-1].job.grammar.kind == "json_object"
    with pytest.raises(openai.BadRequestError) as bad:
        await client.responses.create(model="org/tiny", input="hi", text={"format": {"type": "yaml"}})
    assert bad.value.param == "text.format.type"


async def test_logprobs(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "org/tiny",
        "input": "hi",
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    answer = await client.responses.create(**asked)
    listed = answer.output[0].content[0].logprobs
    assert listed[0].token == "H" and len(listed) == 5
    assert [top.token for top in listed[0].top_logprobs] == ["H", "I"]
    stream = await client.responses.create(**asked, stream=True)
    streamed = [e async for e in stream if e.type == "response.output_text.delta"]
    assert [entry.token for event in streamed for entry in event.logprobs] == [e.token for e in listed]
    plain = await client.responses.create(model="org/tiny", input="hi")
    assert plain.output[0].content[0].logprobs == []


async def test_thinking_that_the_client_keeps(client: openai.AsyncOpenAI, server: Server) -> None:
    know(server, None, "think")
    server.engine.scripts = [["<think>", "deep", "</think>", "Yes."]]
    answer = await client.responses.create(
        model="org/tiny", input="hi", store=False, include=["reasoning.encrypted_content"]
    )
    kept = answer.output[0].to_dict()
    del kept["content"]  # Codex sends the sealed form only
    sent = own_items([kept, answer.output[1].to_dict()], "resp_x")
    (message,) = messages(sent, None)
    assert (message["reasoning_content"], message["content"]) == ("deep", "Yes.")


async def test_errors(client: openai.AsyncOpenAI, server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as long:
        await client.responses.create(model="org/tiny", input="x" * 600)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "input")
    with pytest.raises(openai.NotFoundError) as missing:
        await client.responses.create(model="gpt-5", input="hi")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as before:
        await client.responses.create(model="org/tiny", input="hi", previous_response_id="resp_0")
    assert (before.value.code, before.value.param) == ("previous_response_not_found", "previous_response_id")
    server.engine.refusal = Overloaded("full")
    for more in ({}, {"stream": True}, {"background": True}):
        with pytest.raises(openai.RateLimitError):
            await client.responses.create(model="org/tiny", input="hi", **more)


async def test_key(start: Start, tmp_path: Path) -> None:
    server = await start(ServeConfig(api_key=("right",), data_dir=str(tmp_path)))
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.responses.retrieve("resp_0")


MESSAGE = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{}]}, "input[0].type"),
        ({"input": [{"type": 5}]}, "input[0].type"),
        ({"input": [MESSAGE, {"role": "user", "content": 5}]}, "input[1].content"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "nobody", "content": "hi"}]}, "input[0].role"),
        ({"input": [{"role": [], "content": "hi"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "user", "content": [{}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": [{"type": "item_reference", "id": f"msg_{'0' * 32}o0"}]}, "input[0]"),
        ({"input": "hi", "prompt": {"id": "p"}}, "prompt"),
        ({"input": "hi", "conversation": "conv"}, "conversation"),
        ({"input": "hi", "truncation": "middle"}, "truncation"),
        ({"input": "hi", "metadata": {str(i): "v" for i in range(17)}}, "metadata"),
        ({"input": "hi", "metadata": {"k": "v" * 600}}, "metadata"),
        ({"input": "hi", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "hi", "max_tool_calls": 0}, "max_tool_calls"),
        ({"input": "hi", "temperature": -1}, "temperature"),
        ({"input": "hi", "top_logprobs": -1}, "top_logprobs"),
        ({"input": "hi", "background": True, "store": False}, "background"),
        ({"input": "hi", "tool_choice": "required"}, "tool_choice"),
        ({"input": "hi", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "hi", "text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"input": "hi", "metadata": {"a": 5}}, "metadata"),
        ({"input": "hi", "lora_path": "x"}, "lora_path"),
    ],
)
async def test_what_is_wrong_is_named(server: Server, body: dict[str, Any], param: str) -> None:
    status, answer = await server.post(URL, body)
    error = answer["error"]
    assert status in (400, 404) and error["param"] == param, error
    assert "messages" not in error["message"]
    assert not server.engine.runs


async def test_an_item_of_an_unknown_type_is_named(server: Server) -> None:
    items = [{"type": "mesage", "role": "user", "content": "I am Bob."}, {"role": "user", "content": "hi"}]
    async with server.http.post(URL, json={"input": items}) as response:
        assert response.status == 200
        assert response.headers["X-Loom-Warning"] == "'input[0]' is ignored: no item has the type 'mesage'"


async def test_what_others_send_is_tolerated(server: Server) -> None:
    """Codex and the AI SDK: tools and items of their own, fields without meaning here, nulls."""
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
        {"type": "agent_message", "author": "a", "content": [{"type": "encrypted_content"}]},
        {"type": "item_reference", "id": "msg_from_elsewhere"},
        {"role": "user", "content": "list"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "another's", "content": None},
        {"type": "local_shell_call", "call_id": "c1", "action": {"command": ["ls"]}, "status": "completed"},
        {"type": "local_shell_call_output", "call_id": "c1", "output": "a b"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "+x"},
        {
            "type": "custom_tool_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "ok"}],
        },
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "tool_search_call", "call_id": "c3", "execution": "client", "arguments": {}},
        {"type": "ghost_snapshot", "ghost_commit": {}},
        {"type": "local_shell_call", "id": "c4", "call_id": None, "action": {"command": ["ls"]}},
        {"type": "function_call_output", "call_id": "c4", "output": [{"type": "input_text", "text": "c"}]},
    ]
    body = {
        "model": "org/tiny",
        "input": items,
        "tools": [
            {"type": "local_shell"},
            {"type": "namespace", "name": "n", "tools": []},
            {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark"}},
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "service_tier": "auto",
        "user": "u",
        "max_tool_calls": 3,
        "reasoning": {"effort": None, "summary": "auto"},
        "text": {"verbosity": "low"},
        "client_metadata": {"x": 1},
        "stop": None,
        "background": None,
        "previous_response_id": None,
    }
    await server.ask(URL, body)
    assert server.prompt == (
        "system: rules\nuser: list\nassistant: \ntool: a b\nassistant: \ntool: ok\n"
        "assistant: \ntool: c\nassistant: "
    )


async def test_references_stand_for_items(server: Server) -> None:
    _, first = await server.post(URL, {"input": "one"})
    sent = [{"type": "item_reference", "id": first["output"][0]["id"]}, {"role": "user", "content": "two"}]
    _, second = await server.post(URL, {"input": sent})
    expected = f"assistant: {SAID}\nuser: two\nassistant: "
    assert server.prompt == expected
    await server.post(URL, {"input": "three", "previous_response_id": second["id"]})
    assert server.prompt.startswith(expected)


async def test_input_items_in_pages(server: Server) -> None:
    sent = [{"role": "user", "content": str(i)} for i in range(5)]
    _, made = await server.post(URL, {"input": sent})

    async def page(query: str) -> dict[str, Any]:
        async with server.http.get(f"{URL}/{made['id']}/input_items{query}") as response:
            return {"status": response.status, **await response.json()}

    def texts(listed: dict[str, Any]) -> list[str]:
        return [item["content"][0]["text"] for item in listed["data"]]

    first = await page("?limit=2")
    assert (texts(first), first["has_more"]) == (["4", "3"], True)
    rest = await page(f"?after={first['last_id']}")
    assert (texts(rest), rest["has_more"]) == (["2", "1", "0"], False)
    assert texts(await page("?order=asc&limit=1")) == ["0"]
    for bad in ("?order=up", "?limit=x", "?limit=101", "?after=nothing"):
        assert (await page(bad))["status"] == 400


async def test_truncation_lets_the_oldest_go(server: Server) -> None:
    sent = [{"role": "user", "content": f"{i} {'x' * 60}"} for i in range(12)]
    status, body = await server.post(URL, {"input": sent, "instructions": "Rules."})
    assert status == 400 and body["error"]["code"] == "context_length_exceeded"
    asked = {"input": sent, "instructions": "Rules.", "truncation": "auto", "max_output_tokens": 5}
    await server.ask(URL, asked)
    shown = bytes(server.engine.runs[-1].prompt.tolist()).decode()
    assert shown.startswith("system: Rules.\nuser: ") and "user: 11 x" in shown and "user: 0 x" not in shown


def test_rules_become_one_message() -> None:
    sent = own_items([{"role": "developer", "content": "b"}, {"role": "user", "content": "c"}], "resp_x")
    assert messages(sent, "a") == [{"role": "system", "content": "a\n\nb"}, {"role": "user", "content": "c"}]


def test_shortening_keeps_rules_last_message_and_pairs() -> None:
    rules, ask = {"role": "system"}, {"role": "user"}
    call, result = {"role": "assistant"}, {"role": "tool"}
    assert shortened([rules, call, result, ask]) == [rules, ask]
    assert shortened([rules, ask]) is None
    assert shortened([rules]) is None
    assert shortened([ask, result]) == [result]
