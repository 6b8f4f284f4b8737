"""Tools over HTTP: what a request may say, what the engine is asked for, what clients read."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import openai
import pytest

from app.api.openai.stream import finished
from app.parsers.registry import TOOLS
from app.text.template import ChatTemplate
from core.types import Finish, FinishReason
from tests.rigs.assets import asset
from tests.rigs.requests import CHAT
from tests.rigs.server import Server, know
from tests.rigs.tokenizer import ByteTokenizer, JoinTemplate
from tests.rigs.tools import CALL, HI, SCHEMA, WEATHER

NOW = {"type": "function", "function": {"name": "now"}}
STRICT = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
NAMED = {"type": "function", "function": {"name": "weather"}}
OTHER = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def chat(**fields: object) -> dict[str, Any]:
    return {"messages": HI, "tools": [WEATHER, NOW], **fields}


@pytest.fixture
async def client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    know(server)
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


# -- what may be asked -----------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{}]}, "tools[0].function.name"),
    ({"tools": [NOW, {"type": "function", "function": {"name": "a b"}}]}, "tools[1].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "n" * 65}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    ({"tools": [NOW, NOW]}, "tools[1].function.name"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
    (
        {"tools": [{"function": {"name": "f", "parameters": {"type": "array"}}}]},
        "tools[0].function.parameters",
    ),
    (
        {"tools": [{"function": {"name": "f", "parameters": {"properties": 5}}}]},
        "tools[0].function.parameters.properties",
    ),
    ({"tools": [{"function": {"name": "f", "strict": "yes"}}]}, "tools[0].function.strict"),
    ({"tools": [{"function": {"name": "f", "description": 5}}]}, "tools[0].function.description"),
    ({"tools": [{"function": {"name": f"f{i}"}} for i in range(129)]}, "tools"),
    ({"tools": None, "tool_choice": "required"}, "tool_choice"),
    ({"tools": None, "tool_choice": NAMED}, "tool_choice"),
    ({"tool_choice": "always"}, "tool_choice"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function.name"),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": 3}}, "tool_choice.allowed_tools"),
    (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "no", "tools": [NAMED]}}},
        "tool_choice.allowed_tools.mode",
    ),
    (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
        "tool_choice.allowed_tools.tools",
    ),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
]


async def test_what_is_wrong_about_tools_is_named(server: Server) -> None:
    know(server)
    for fields, param in WRONG:
        assert (await server.refused(CHAT, chat(**fields)))["param"] == param
    assert not server.engine.runs


async def test_calls_that_cannot_be_made_to_happen_are_refused(server: Server) -> None:
    know(server, None)
    for fields, param in (
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tools": [STRICT]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "tools"),
    ):
        status, answer = await server.post(CHAT, chat(**fields))
        assert (status, answer["error"]["param"]) == (400, param), answer
        assert answer["error"]["code"] == "unsupported"
    await server.ask(CHAT, chat())


async def test_the_choice_reaches_prompt_and_grammar(server: Server) -> None:
    know(server)
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
    required = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
    cases: list[tuple[dict[str, Any], int, set[str] | None]] = [
        # fields, tools in the prompt, functions in the grammar
        ({}, 2, None),
        ({"tool_choice": "auto"}, 2, None),
        ({"tool_choice": "none"}, 0, None),
        ({"tool_choice": "required"}, 2, {"weather", "now"}),
        ({"tool_choice": NAMED}, 2, {"weather"}),
        ({"tool_choice": allowed}, 1, None),
        ({"tool_choice": required}, 2, {"weather"}),
        ({"tools": [STRICT, NOW]}, 2, {"weather", "now"}),
    ]
    for fields, shown, named in cases:
        await server.ask(CHAT, chat(**fields))
        job = server.engine.runs[-1].job
        assert job.prompt.startswith(f"tools: {shown}\n" if shown else "user")
        text = job.grammar.text if job.grammar else ""
        assert {name for name in ("weather", "now") if f'{{\\"name\\": \\"{name}\\"' in text} == (
            named or set()
        )
        assert job.text.skip_special_tokens


async def test_a_function_is_lenient_where_strict_is_false(server: Server) -> None:
    know(server)
    for strict, lenient in ((False, True), (True, False), (None, False)):
        tool = {"type": "function", "function": {**WEATHER["function"], "strict": strict}}
        await server.post(CHAT, chat(tools=[tool], tool_choice="required"))
        text = server.engine.runs[-1].job.grammar.text
        assert ('"lenient":true' in text) is lenient


async def test_one_call_at_most_where_a_grammar_can_say_so(server: Server) -> None:
    know(server)
    for fields in ({"tool_choice": NAMED}, {"tool_choice": "required", "parallel_tool_calls": False}):
        await server.post(CHAT, chat(**fields))
        spec = json.loads(server.engine.runs[-1].job.grammar.text)["format"]
        assert spec["stop_after_first"] and spec["at_least_one"]


async def test_everything_in_one_grammar(server: Server) -> None:
    know(server, reasoning="think")
    answer = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    await server.post(CHAT, chat(response_format=answer))
    grammar = server.engine.runs[-1].job.grammar
    think, either = json.loads(grammar.text)["format"]["elements"]
    assert think["type"] == "optional" and either["type"] == "or" and grammar.kind == "structural_tag"
    assert [element["type"] for element in either["elements"]] == ["json_schema", "tags_with_separator"]


async def test_special_tokens_that_mark_calls_are_seen(server: Server) -> None:
    for family, fields, skips in (("llama3", {}, False), ("llama3", {"tool_choice": "none"}, True)):
        know(server, family)
        await server.post(CHAT, chat(**fields))
        assert server.engine.runs[-1].job.text.skip_special_tokens is skips


# -- what comes back -------------------------------------------------------------------------------


async def test_a_whole_answer_with_calls(server: Server) -> None:
    know(server)
    server.engine.scripts = [list(f"Let me look.\n\n{CALL}\n{OTHER}")]
    status, answer = await server.post(CHAT, chat())
    [choice] = answer["choices"]
    calls = choice["message"].pop("tool_calls")
    assert status == 200 and choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {"role": "assistant", "content": "Let me look.\n", "refusal": None}
    assert len({call["id"] for call in calls}) == 2
    assert [(call["type"], call["function"]["name"]) for call in calls] == [
        ("function", "weather"),
        ("function", "now"),
    ]
    assert json.loads(calls[0]["function"]["arguments"]) == {"city": "Ós </tool_call>lo"}
    assert answer["usage"]["completion_tokens"] == len(f"Let me look.\n\n{CALL}\n{OTHER}")


async def test_no_content_beside_a_call_is_null(server: Server) -> None:
    know(server)
    server.engine.scripts = [[CALL], ["Nothing."], [CALL[:30]]]
    for content, reason, calls in ((None, "tool_calls", 1), ("Nothing.", "stop", 0), (CALL[:30], "stop", 0)):
        _, answer = await server.post(CHAT, chat())
        [choice] = answer["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (content, reason)
        assert len(choice["message"].get("tool_calls", ())) == calls


async def both(server: Server, body: dict[str, Any]) -> tuple[Any, Any]:
    """Content, calls and reason: of an answer's only choice, and as the deltas of its stream make them."""
    [choice] = (await server.post(CHAT, body))[1]["choices"]
    calls = [each["function"] for each in choice["message"].get("tool_calls", ())]
    whole = (choice["message"]["content"] or "", calls, choice["finish_reason"])
    content, told, reason = "", [], None
    for event in (await server.events(CHAT, {**body, "stream": True}))[:-1]:
        [choice] = json.loads(event)["choices"]
        content += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", ()):
            if "id" in call:
                told.append(call["function"])
            else:
                told[-1]["arguments"] += call["function"]["arguments"]
        reason = choice["finish_reason"]
    return whole, (content, told, reason)


@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
async def test_a_call_cut_by_length_is_one_with_half_its_arguments(server: Server, choice: Any) -> None:
    know(server)
    for length in range(1, len(CALL)):
        server.engine.scripts = [list(CALL)] * 2
        whole, streamed = await both(server, chat(max_tokens=length, tool_choice=choice))
        assert whole == streamed and whole[2] == "length"
        content, calls, _ = whole
        assert '{"city": "Ós </tool_call>lo"}'.startswith("".join(call["arguments"] for call in calls))
        assert [call["name"] for call in calls] == ["weather"][: len(calls)]
        if choice == "auto":
            assert content == ("" if calls else CALL[:length])
        else:
            assert content == "" and (calls or choice == "required")
    assert calls[0]["arguments"] == '{"city": "Ós </tool_call>lo"}'


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
async def test_streams_and_whole_answers_are_the_same(server: Server, size: int) -> None:
    know(server, reasoning="think")
    for text, calls in (
        (f"Let me look.\n\n{CALL}\n{OTHER}\nSo. ", 2),
        (f"<think>\nHm.\n{CALL}\n{OTHER}", 2),
        (f"<think>Hm.</think>\n\nSo {CALL[:-9]}", 1),
        (CALL[:70], 1),
    ):
        server.engine.scripts = [[text[i : i + size] for i in range(0, len(text), size)]] * 2
        whole, streamed = await both(server, chat())
        assert whole == streamed and len(whole[1]) == calls and "tool_call" not in whole[0]
        assert whole[2] == ("stop" if text == CALL[:70] else "tool_calls")


async def test_a_required_call_in_other_formats(server: Server) -> None:
    listed = '[{"name": "weather", "arguments": {"city": "Oslo"}}]'
    for family, text in (
        ("granite", f"<|tool_call|>{listed}"),
        ("phi4_mini_json", f"functools{listed}"),
        ("olmo3", '<function_calls>weather(city="Oslo")</function_calls>'),
        (
            "deepseek_v32",
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" '
            'string="true">Oslo</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        ),
    ):
        know(server, family)
        server.engine.scripts = [list(text)] * 2
        whole, streamed = await both(server, chat(tool_choice="required"))
        assert whole == streamed and whole[0] == "" and whole[2] == "tool_calls"
        assert [json.loads(call["arguments"]) for call in whole[1]] == [{"city": "Oslo"}], family
        assert server.engine.runs[-1].job.grammar.kind == "structural_tag"


async def test_the_stream_of_a_call(server: Server) -> None:
    know(server)
    server.engine.scripts = [["Hm", ".\n", "<tool_", 'call>{"name": "weather", "arg', 'uments": {"ci']]
    server.engine.scripts[0] += ['ty": "Os', 'lo"}', "}\n</tool_call>"]
    events = await server.events(CHAT, chat(stream=True))
    assert events.pop() == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events]
    deltas = [choice["delta"] for choice in choices]
    start = deltas[2]["tool_calls"][0]
    assert start.pop("id").startswith("call_")
    assert start == {"index": 0, "type": "function", "function": {"name": "weather", "arguments": ""}}
    told = [{"index": 0, "function": {"arguments": text}} for text in ('{"ci', 'ty": "Os', 'lo"}')]
    assert deltas[:2] == [{"role": "assistant", "content": "Hm"}, {"content": "."}]
    assert [delta["tool_calls"] for delta in deltas[3:6]] == [[each] for each in told]
    assert choices[-1]["finish_reason"] == "tool_calls" and deltas[6:] == [{}]


async def test_bare_arguments_are_told_as_json_of_their_schema(server: Server) -> None:
    know(server, "qwen3_coder")
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"n": {"type": "string"}}}},
    }
    text = "<tool_call>\n<function=f>\n<parameter=n>\n12\n</parameter>\n<parameter=m>\n12\n</parameter>\n"
    server.engine.scripts = [list(text + "</function>\n</tool_call>")]
    events = await server.events(CHAT, chat(tools=[tool], stream=True))
    assert events.pop() == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events]
    calls = [call["function"] for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert json.loads("".join(call["arguments"] for call in calls)) == {"n": "12", "m": 12}
    assert calls[0]["name"] == "f" and choices[-1]["finish_reason"] == "tool_calls"


def strict(tool: dict[str, Any]) -> dict[str, Any]:
    return {**tool, "function": {**tool["function"], "strict": True}}


@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_openais_streaming_helper_puts_calls_together(
    client: openai.AsyncOpenAI, server: Server, size: int
) -> None:
    text = f"Let me look.\n{CALL}\n{OTHER}"
    server.engine.scripts = [[text[i : i + size] for i in range(0, len(text), size)]]
    tools = [strict(WEATHER), strict(NOW)]  # some releases of the helper take no others
    async with client.chat.completions.stream(model="org/tiny", messages=HI, tools=tools) as stream:
        seen = [event async for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = await stream.get_final_completion()
    [choice] = final.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me look."
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    assert calls == [("weather", {"city": "Ós </tool_call>lo"}), ("now", {})]
    assert (
        "".join(event.arguments_delta for event in seen if event.index == 0)
        == '{"city": "Ós </tool_call>lo"}'
    )


async def test_choices_are_read_apart(client: openai.AsyncOpenAI, server: Server) -> None:
    server.engine.scripts = [list(CALL)]
    stream = await client.chat.completions.create(
        model="org/tiny", messages=HI, tools=[WEATHER], stream=True, n=3
    )
    arguments = ["", "", ""]
    async for chunk in stream:
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or ():
                arguments[choice.index] += call.function.arguments
    assert [json.loads(text)["city"] for text in arguments] == ["Ós </tool_call>lo"] * 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_second_call_ends_the_request(server: Server, stream: bool) -> None:
    know(server)
    server.engine.scripts = [[*f"{CALL}\n{OTHER}", *("x" * 200)]]
    body = chat(parallel_tool_calls=False, stream=stream)
    if stream:
        events = [json.loads(event)["choices"][0] for event in (await server.events(CHAT, body))[:-1]]
        names = [
            call["function"]["name"]
            for event in events
            for call in event["delta"].get("tool_calls", ())
            if "id" in call
        ]
        reason = events[-1]["finish_reason"]
    else:
        [choice] = (await server.post(CHAT, body))[1]["choices"]
        names = [call["function"]["name"] for call in choice["message"]["tool_calls"]]
        reason = choice["finish_reason"]
    assert names == ["weather"] and reason == "tool_calls"
    assert server.engine.runs[-1].ended == [0]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_parsers_fault_ends_one_request(
    server: Server, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def faulty(parser: Any) -> Any:
        yield from parser.cursor.expect("<tool_call>")
        raise RuntimeError("a bug")

    know(server)
    loaded = server.service.loaded
    family = msgspec.structs.replace(TOOLS["hermes"], calls=faulty)
    server.service.ready(msgspec.structs.replace(loaded, tools=family))
    server.engine.scripts = [["a ", CALL, "b"]]
    if stream:
        events = await server.events(CHAT, chat(stream=True))
        assert json.loads(events[-2])["error"]["type"] == "server_error" and events[-1] == "[DONE]"
        assert json.loads(events[0])["choices"][0]["delta"]["content"] == "a "
    else:
        status, answer = await server.post(CHAT, chat())
        assert (status, answer["error"]["type"]) == (500, "server_error")
    assert "a bug" in caplog.text
    status, answer = await server.post(CHAT, {"messages": HI})
    assert status == 200 and answer["choices"][0]["message"]["content"] == "Hello wörld 😀!"
    assert not server.engine.live


async def test_a_failure_amid_a_call_is_an_error_event(server: Server) -> None:
    know(server)
    server.engine.scripts, server.engine.fail_at = [list(CALL)], 60
    events = await server.events(CHAT, chat(stream=True))
    assert "The device was lost" in events[-2]


async def test_logprobs_and_ids_come_with_calls(server: Server) -> None:
    know(server)
    server.engine.scripts = [list(CALL)] * 2
    body = chat(logprobs=True, top_logprobs=1, return_token_ids=True)
    [whole] = (await server.post(CHAT, body))[1]["choices"]
    events = (await server.events(CHAT, {**body, "stream": True}))[:-1]
    choices = [json.loads(event)["choices"][0] for event in events]
    tokens = [token for choice in choices for token in choice.get("token_ids", ())]
    told = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert tokens == whole["token_ids"] and len(tokens) == len(CALL)
    assert told == whole["logprobs"]["content"]


# -- models whose template has no tools ------------------------------------------------------------

ROUTES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": HI, "tools": [WEATHER]}),
    (
        "/v1/responses",
        {"input": "hi", "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}]},
    ),
    (
        "/v1/messages",
        {"messages": HI, "max_tokens": 99, "tools": [{"name": "weather", "input_schema": SCHEMA}]},
    ),
    ("/api/chat", {"messages": HI, "tools": [WEATHER]}),
    ("/v2/chat", {"model": "org/tiny", "messages": HI, "tools": [WEATHER]}),
]
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), ROUTES, ids=[path for path, _ in ROUTES])
async def test_half_a_call_is_told_in_every_dialect(
    server: Server, path: str, body: dict[str, Any], stream: bool
) -> None:
    know(server)
    server.engine.scripts = [["Sure. ", *CALL[:60]]]
    async with server.http.post(path, json={**body, "stream": stream}) as response:
        text = await response.text()
    assert response.status == 200 and '"weather"' in text.replace("\\", "") and "Sure. " in text
    marked = path == "/api/chat"  # its clients take whole calls only: what is left of one is text
    assert ("tool_call>" in text) == marked and not server.engine.live


def plainly(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's template knows no tools, and its context has room for what is said of them."""
    monkeypatch.setattr("tests.rigs.engine.CONTEXT", 4096)
    server.service.ready(msgspec.structs.replace(server.service.loaded, template=ChatTemplate(PLAIN)))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), ROUTES, ids=[path for path, _ in ROUTES])
async def test_tools_reach_a_model_whose_template_has_none(
    server: Server, path: str, body: dict[str, Any], stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    know(server, "llama3")
    plainly(server, monkeypatch)
    server.engine.scripts = [list(CALL), ["No."]]
    async with server.http.post(path, json={**body, "stream": stream}) as response:
        text = await response.text()
        assert response.status == 200, text
        assert "does not render tools" in response.headers["X-Loom-Warning"]
    assert "weather" in text and "<tool_call>" not in text
    prompt = server.engine.runs[-1].job.prompt
    assert prompt.startswith("system: # Tools") and '"name": "weather"' in prompt
    async with server.http.post(path, json={**body, "tools": [], "stream": stream}) as response:
        await response.read()
        assert response.status == 200 and "X-Loom-Warning" not in response.headers
    assert server.engine.runs[-1].job.prompt == "user: hi\n"


async def test_every_choice_of_tools_works_where_the_template_has_none(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    know(server)
    plainly(server, monkeypatch)
    for choice, named in (("auto", None), ("required", {"weather", "now"}), (NAMED, {"weather"})):
        server.engine.scripts = [list(CALL)]
        [message] = (await server.post(CHAT, chat(tool_choice=choice)))[1]["choices"]
        assert [call["function"]["name"] for call in message["message"]["tool_calls"]] == ["weather"]
        grammar = server.engine.runs[-1].job.grammar
        found = {
            name for name in ("weather", "now") if grammar and f'{{\\"name\\": \\"{name}\\"' in grammar.text
        }
        assert found == (named or set()) and (grammar is None) == (named is None)
    server.engine.scripts = [["It rains."]]
    await server.post(CHAT, chat(tool_choice="none"))
    assert server.engine.runs[-1].job.prompt == "user: hi\n"


# -- and back again --------------------------------------------------------------------------------


async def test_history_goes_through_a_real_template(server: Server) -> None:
    directory = asset("tokenizers") / "qwen3"
    template = ChatTemplate.load(directory)
    know(server, reasoning="think")
    server.service.ready(msgspec.structs.replace(server.service.loaded, template=template))
    server.engine.scripts = [list(f"<think>\nHm\n</think>\n\nLet me look.\n{CALL}"), ["Fine."]]
    tool = {"type": "function", "function": {"name": "w", "parameters": {"type": "object"}}}
    _, answer = await server.post(CHAT, {"messages": HI, "tools": [tool], "truncate_prompt_tokens": 9})
    message = answer["choices"][0]["message"]
    for name in ("reasoning_content", "reasoning"):
        kept = {key: value for key, value in message.items() if key not in ("reasoning_content", "reasoning")}
        history = [*HI, kept | {name: message[name]}]
        history.append({"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "4°"})
        answer = await server.ask("/tokenize", {"messages": history, "tools": None})
        text = ByteTokenizer().decode(answer["tokens"])
        assert f"<think>\nHm\n</think>\n\nLet me look.\n{CALL}<|im_end|>" in text
        assert "<tool_response>\n4°\n</tool_response>" in text


async def test_mistrals_short_ids(server: Server) -> None:
    know(server, "mistral")
    seen: list[Any] = []

    class Template(JoinTemplate):
        async def render_async(self, messages: Any, *args: Any, **kwargs: Any) -> str:
            seen.extend(messages)
            return "x"

    server.service.ready(msgspec.structs.replace(server.service.loaded, template=Template()))
    call = {"id": "call_0123456789abcdef01234567", "type": "function", "function": {"name": "f"}}
    history = [
        *HI,
        {"role": "assistant", "tool_calls": [call, {**call, "id": "123456789"}]},
        {"role": "tool", "tool_call_id": call["id"], "content": "5"},
    ]
    await server.ask(CHAT, {"messages": history})
    ids = [each["id"] for each in seen[1]["tool_calls"]]
    assert ids == [seen[2]["tool_call_id"], "123456789"] and len(ids[0]) == 9 and ids[0].isalnum()


def test_finish_reasons() -> None:
    for reason, calls, told in (
        (FinishReason.STOP, 1, "tool_calls"),
        (FinishReason.STOP, 0, "stop"),
        (FinishReason.LENGTH, 1, "length"),
        (FinishReason.ABORT, 1, "abort"),
    ):
        assert finished(Finish(reason), calls)["finish_reason"] == told
