"""`/v1/responses` against the rules of openresponses.org: its HTTP cases, and its schema of the answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest

from core.config import ServeConfig
from tests.rigs.responses import SCRIPT, URL, events, frames
from tests.rigs.server import Server, Start, know


def nullable(kind: str) -> dict[str, Any]:
    return {"type": [kind, "null"]}


def record(*, kind: str | None = None, **fields: Any) -> dict[str, Any]:
    """An object that must have all of these fields."""
    if kind is not None:
        fields["type"] = {"const": kind}
    return {"type": "object", "required": list(fields), "properties": fields}


TEXT, NUMBER, INTEGER, FLAG = ({"type": name} for name in ("string", "number", "integer", "boolean"))
STATUS = {"enum": ["in_progress", "completed", "incomplete"]}
PART = record(kind="output_text", text=TEXT, annotations={"type": "array"}, logprobs={"type": "array"})
ITEM = {
    "oneOf": [
        record(kind="message", id=TEXT, status=STATUS, role={"const": "assistant"}, content={"items": PART}),
        record(kind="function_call", id=TEXT, call_id=TEXT, name=TEXT, arguments=TEXT, status=STATUS),
        record(kind="reasoning", id=TEXT, summary={"type": "array"}),
    ]
}
USAGE = record(
    input_tokens=INTEGER,
    output_tokens=INTEGER,
    total_tokens=INTEGER,
    input_tokens_details=record(cached_tokens=INTEGER),
    output_tokens_details=record(reasoning_tokens=INTEGER),
)
RESPONSE = record(
    id=TEXT,
    object={"const": "response"},
    created_at=INTEGER,
    completed_at=nullable("integer"),
    status=TEXT,
    incomplete_details=nullable("object"),
    model=TEXT,
    previous_response_id=nullable("string"),
    instructions=nullable("string"),
    output={"type": "array", "items": ITEM},
    error=nullable("object"),
    tools={
        "items": record(
            kind="function",
            name=TEXT,
            description=nullable("string"),
            parameters=nullable("object"),
            strict=nullable("boolean"),
        )
    },
    tool_choice={"enum": ["none", "auto", "required"]},
    truncation={"enum": ["auto", "disabled"]},
    parallel_tool_calls=FLAG,
    text=record(format=record(kind="text")),
    top_p=NUMBER,
    presence_penalty=NUMBER,
    frequency_penalty=NUMBER,
    top_logprobs=INTEGER,
    temperature=NUMBER,
    reasoning=record(effort=nullable("string"), summary=nullable("string")),
    usage={"oneOf": [USAGE, {"type": "null"}]},
    max_output_tokens=nullable("integer"),
    max_tool_calls=nullable("integer"),
    store=FLAG,
    background=FLAG,
    service_tier=TEXT,
    metadata={"type": "object"},
    safety_identifier=nullable("string"),
    prompt_cache_key=nullable("string"),
)
PLACE = {"item_id": TEXT, "output_index": INTEGER}
EVENTS = {
    "response.created": {"response": RESPONSE},
    "response.in_progress": {"response": RESPONSE},
    "response.completed": {"response": RESPONSE},
    "response.output_item.added": {"output_index": INTEGER, "item": ITEM},
    "response.output_item.done": {"output_index": INTEGER, "item": ITEM},
    "response.content_part.added": {**PLACE, "content_index": INTEGER, "part": PART},
    "response.content_part.done": {**PLACE, "content_index": INTEGER, "part": PART},
    "response.output_text.delta": {**PLACE, "content_index": INTEGER, "delta": TEXT, "logprobs": {}},
    "response.output_text.done": {**PLACE, "content_index": INTEGER, "text": TEXT, "logprobs": {}},
    "response.function_call_arguments.delta": {**PLACE, "delta": TEXT},
    "response.function_call_arguments.done": {**PLACE, "arguments": TEXT},
}
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
SAYS = ["Ahoy", " there."]
CALLS = ['<tool_call>\n{"name": "get_weather", "argum', 'ents": {"city": "Rome"}}\n</tool_call>']


def message(role: str, content: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content}


CASES = {
    "basic response": ([message("user", "Say hello.")], None, SAYS, "message"),
    "system prompt": ([message("system", "A pirate."), message("user", "Hello.")], None, SAYS, "message"),
    "several turns": (
        [message("user", "I am Alice."), message("assistant", "Hi!"), message("user", "Who am I?")],
        None,
        SAYS,
        "message",
    ),
    "tool calling": ([message("user", "Rome's weather?")], [WEATHER], CALLS, "function_call"),
}


@pytest.fixture
async def server(start: Start, tmp_path: Path) -> Server:
    made = await start(ServeConfig(data_dir=str(tmp_path)))
    know(made)
    return made


@pytest.mark.parametrize("case", CASES)
async def test_answers_have_the_schema(server: Server, case: str) -> None:
    sent, tools, script, kind = CASES[case]
    body = {"model": "org/tiny", "input": sent, **({"tools": tools} if tools else {})}
    server.engine.scripts = [script, script]
    whole = await server.ask(URL, body)
    told = events(await frames(server, "POST", URL, {**body, "stream": True}))
    for event in told:
        jsonschema.validate(event, record(sequence_number=INTEGER, **EVENTS[event["type"]]))
    for response in (whole, told[-1]["response"]):
        jsonschema.validate(response, RESPONSE)
        assert response["status"] == "completed" and response["completed_at"] >= response["created_at"]
        assert [item["type"] for item in response["output"]] == [kind]
    if tools:
        assert {f"response.function_call_arguments.{part}" for part in ("delta", "done")} <= {
            event["type"] for event in told
        }


async def test_what_was_asked_for_is_told(server: Server) -> None:
    server.engine.scripts = [SCRIPT]
    strict = {**WEATHER, "strict": True}
    body = {"input": "hi", "tools": [strict], "presence_penalty": 0.5, "frequency_penalty": -0.25}
    _, answer = await server.post(URL, body)
    assert answer["tools"] == [strict]
    assert (answer["presence_penalty"], answer["frequency_penalty"]) == (0.5, -0.25)


async def test_input_tokens_are_those_of_the_answer(server: Server) -> None:
    server.engine.scripts = [["x"]] * 2
    first = (await server.post(URL, {"input": "one", "instructions": "Be brief."}))[1]
    body = {"input": "two", "previous_response_id": first["id"], "tools": [WEATHER]}
    runs = len(server.engine.runs)
    status, counted = await server.post(f"{URL}/input_tokens", body)
    assert status == 200 and counted["object"] == "response.input_tokens"
    assert len(server.engine.runs) == runs
    _, answer = await server.post(URL, body)
    assert counted["input_tokens"] == answer["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    status, refused = await server.post(f"{URL}/input_tokens", {"input": []})
    assert status == 400 and refused["error"]["param"] == "input"
    status, refused = await server.post(f"{URL}/input_tokens", {"input": "hi", "model": "gpt-5"})
    assert status == 404 and refused["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("kept", [True, False])
async def test_an_unknown_previous_response_is_named(start: Start, tmp_path: Path, kept: bool) -> None:
    config = ServeConfig(data_dir=str(tmp_path)) if kept else ServeConfig(response_store=0)
    server = await start(config)
    error = await server.refused(URL, {"input": "hi", "previous_response_id": "resp_0"})
    assert error["code"] == "previous_response_not_found"
    assert error["param"] == "previous_response_id" and "resp_0" in error["message"]
