"""gpt-oss over HTTP, with its own chat template: what a model wrote goes back as it wrote it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from app.parsers.harmony import BEGINS, ENDS, MESSAGE
from app.text.detokenizer import Detokenizer
from app.text.harmony import turns
from app.text.template import ChatTemplate
from app.text.tokenizer import Tokenizer
from tests.rigs import vocabularies
from tests.rigs.assets import template
from tests.rigs.requests import CHAT
from tests.rigs.responses import URL
from tests.rigs.server import Server, know
from tests.rigs.tokenizer import ByteTokenizer
from tests.rigs.tools import HI, WEATHER

TEMPLATE = ChatTemplate(template("gpt-oss"))
NEXT = "<|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>I need it.<|end|>{NEXT}"
CALL = ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo"}'
"""The call as the template writes it."""
ASKED = [THOUGHT, CALL]
ANSWER = [f"<|channel|>analysis<|message|>Rain.<|end|>{NEXT}", "<|channel|>final<|message|>", "It ", "rains."]
USER = "<|start|>user<|message|>hi<|end|>"
ROUND = f"{USER}{NEXT}{THOUGHT}{CALL}<|call|><|start|>functions.weather to=assistant<|channel|>commentary"
ROUND += f'<|message|>"rain"<|end|>{NEXT}'
"""The prompt that the model gets after its call."""


@pytest.fixture
def gpt_oss(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr("tests.rigs.engine.CONTEXT", 8192)
    know(server, "harmony", "harmony")
    server.service.ready(msgspec.structs.replace(server.service.loaded, template=TEMPLATE))
    return server


def prompt(server: Server, at: int = -1) -> str:
    shown = server.engine.runs[at].job.prompt
    return shown if isinstance(shown, str) else ByteTokenizer().decode(shown.tolist())


async def test_a_call_and_its_result_over_chat(gpt_oss: Server) -> None:
    gpt_oss.engine.scripts = [ASKED, ANSWER, ANSWER]
    body: dict[str, Any] = {"messages": HI, "tools": [WEATHER], "reasoning_effort": "high"}
    _, answer = await gpt_oss.post(CHAT, body)
    [choice] = answer["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls" and message["reasoning"] == "I need it."
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert "\nReasoning: high\n" in prompt(gpt_oss) and "namespace functions" in prompt(gpt_oss)
    assert prompt(gpt_oss).endswith(USER + NEXT)
    assert not gpt_oss.engine.runs[-1].job.text.skip_special_tokens

    history = [*HI, message, {"role": "tool", "tool_call_id": call["id"], "content": "rain"}]
    _, answer = await gpt_oss.post(CHAT, {**body, "messages": history})
    assert prompt(gpt_oss).endswith(ROUND)
    final = answer["choices"][0]["message"]
    assert (final["content"], final["reasoning"]) == ("It rains.", "Rain.")

    events = await gpt_oss.events(CHAT, {**body, "messages": [*history, final, *HI], "stream": True})
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "It rains."
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == "Rain."
    # The turn is over: its reasoning is not shown any more.
    assert prompt(gpt_oss).endswith(
        f"{ROUND.replace(THOUGHT, '')}<|channel|>final<|message|>It rains.<|end|>{USER}{NEXT}"
    )


async def test_a_call_and_its_result_over_responses(gpt_oss: Server) -> None:
    gpt_oss.engine.scripts = [ASKED, ANSWER]
    tool = {"type": "function", **WEATHER["function"]}
    fields = {"tools": [tool], "reasoning": {"effort": "low"}}
    _, asked = await gpt_oss.post(URL, {"input": "hi", **fields})
    assert [item["type"] for item in asked["output"]] == ["reasoning", "function_call"]
    assert "\nReasoning: low\n" in prompt(gpt_oss)
    result = {"type": "function_call_output", "call_id": asked["output"][1]["call_id"], "output": "rain"}
    items = [{"role": "user", "content": "hi"}, *asked["output"], result]
    _, answer = await gpt_oss.post(URL, {"input": items, **fields})
    assert prompt(gpt_oss).endswith(ROUND)
    thought, said = answer["output"]
    assert thought["content"][0]["text"] == "Rain." and said["content"][0]["text"] == "It rains."


async def test_what_is_constrained(gpt_oss: Server) -> None:
    gpt_oss.engine.scripts = [ASKED] * 3
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    for fields, words in (
        ({"tool_choice": "required"}, ("commentary to=functions.weather <|constrain|>json<|message|>",)),
        ({"response_format": wanted, "tools": None}, ("<|channel|>final<|message|>", "json_schema")),
        ({"reasoning_effort": "none", "response_format": wanted, "tools": None}, ()),
    ):
        await gpt_oss.post(CHAT, {"messages": HI, "tools": [WEATHER], **fields})
        grammar = gpt_oss.engine.runs[-1].job.grammar
        assert grammar is not None and all(word in grammar.text for word in words)
        assert ("<|channel|>analysis<|message|>" in grammar.text) == bool(words)
    assert grammar.kind == "json_schema" and prompt(gpt_oss).endswith("<|channel|>final<|message|>")


@pytest.mark.parametrize("tools", [None, [WEATHER]])
async def test_reasoning_that_is_skipped_or_cut(gpt_oss: Server, tools: Any) -> None:
    final = "" if tools else "<|channel|>final<|message|>"
    body = {"messages": HI, "tools": tools, "max_tokens": 60}
    gpt_oss.engine.scripts = [["Yes."], ["Yes."]]
    for fields in ({"reasoning_effort": "none"}, {"max_thinking_tokens": 0}):
        _, answer = await gpt_oss.post(CHAT, {**body, **fields})
        assert prompt(gpt_oss).endswith(f"{NEXT}<|channel|>analysis<|message|><|end|>{NEXT}{final}")
        message = answer["choices"][0]["message"]
        assert (message["content"], message["reasoning"]) == ("Yes.", None)
    assert "\nReasoning: low\n" in prompt(gpt_oss, 0)

    after = "No." if final else "<|channel|>final<|message|>No."
    gpt_oss.engine.scripts = [["<|channel|>analysis", "<|message|>", *["hm "] * 50], [after]]
    _, answer = await gpt_oss.post(CHAT, {**body, "max_thinking_tokens": 3})
    message = answer["choices"][0]["message"]
    assert message["content"] == "No." and set(message["reasoning"].split()) == {"hm"}
    assert prompt(gpt_oss).endswith(f"<|end|>{NEXT}{final}")
    for run, limited in zip(gpt_oss.engine.runs, (True, True, False, True), strict=True):
        # Where calls may come, too, a grammar keeps the model from going on to reason.
        grammar = run.job.grammar
        assert (grammar is not None) == (bool(tools) and limited)
        assert grammar is None or "<|channel|>analysis" not in grammar.text


async def test_an_answer_that_is_continued(gpt_oss: Server) -> None:
    begun = [*HI, {"role": "assistant", "content": "It"}]
    gpt_oss.engine.scripts = [[" is", "."]]
    wanted = {"type": "json_object"}
    body = {"messages": begun, "tools": [WEATHER], "response_format": wanted, "continue_final_message": True}
    _, answer = await gpt_oss.post(CHAT, body)
    assert prompt(gpt_oss).endswith(f"{USER}{NEXT}<|channel|>final<|message|>It")
    grammar = gpt_oss.engine.runs[-1].job.grammar
    assert grammar is not None and grammar.kind == "json_object"
    assert answer["choices"][0]["message"]["content"] == " is."


def test_marks_are_tokens_that_are_shown_and_two_of_them_end_a_turn() -> None:
    core = vocabularies.byte_level()
    core.add_special_tokens([*BEGINS, *ENDS, MESSAGE])
    tokenizer = Tokenizer(core, {})
    assert {core.id_to_token(id) for id in tokenizer.eos_ids} == {"<|im_end|>", "<|call|>", "<|return|>"}
    text = "".join([*ANSWER, "<|end|>"])
    for skip, shown in ((False, text), (True, "analysisRain.assistantfinalIt rains.")):
        detokenizer = Detokenizer(tokenizer, [], skip)
        assert "".join(detokenizer.feed([id]) for id in tokenizer.encode(text, False).tolist()) == shown


def test_conversations_as_the_template_takes_them() -> None:
    def call(id: str, name: str) -> dict[str, Any]:
        return {"id": id, "type": "function", "function": {"name": name, "arguments": {}}}

    def result(id: str, text: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": id, "content": text}

    shown = TEMPLATE.render(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "system", "content": "Be kind."},
            *HI,
            {
                "role": "assistant",
                "content": "I look.",
                "reasoning_content": "Both.",
                "tool_calls": [call("a", "f"), call("b", "g")],
            },
            result("b", "of g"),
            result("a", "of f"),
        ],
        tools=[{"type": "function", "function": {"name": "f"}}],
        reasoning_effort="minimal",
    )
    assert "# Instructions\n\nBe brief.\n\nBe kind.\n\n# Tools" in shown and "\nReasoning: low\n" in shown
    assert "type f = () => any;" in shown
    head = " to=assistant<|channel|>commentary<|message|>"
    assert shown.endswith(
        f"{USER}{NEXT}<|channel|>analysis<|message|>Both.\nI look.<|end|>"
        f"{NEXT} to=functions.f<|channel|>commentary json<|message|>{{}}<|call|>"
        f'<|start|>functions.f{head}"of f"<|end|>'
        f"{NEXT} to=functions.g<|channel|>commentary json<|message|>{{}}<|call|>"
        f'<|start|>functions.g{head}"of g"<|end|>{NEXT}'
    )
    # Results without an id belong to the calls in order. Results beyond the last call are kept.
    calls = [{"function": {"name": name, "arguments": {}}} for name in "fg"]
    results = [{"role": "tool", "content": text} for text in ("1", "2", "3")]
    asked = {"role": "assistant", "content": "", "tool_calls": calls}
    assert [each.get("content") for each in turns([asked, *results])] == ["", "1", "", "2", "3"]


async def test_conversations_in_which_something_is_empty(gpt_oss: Server) -> None:
    """Calls, as answers of other servers have them; instructions; a template's argument."""
    said = {"role": "assistant", "content": "Hm.", "tool_calls": []}
    silent = [{"role": "system", "content": ""}]
    for fields in (
        {"messages": [*HI, said, *HI]},
        {"messages": silent},
        {"messages": silent, "continue_final_message": True},
        {"messages": HI, "chat_template_kwargs": {"reasoning_effort": None}},
    ):
        gpt_oss.engine.scripts = [["Yes."]]
        await gpt_oss.ask(CHAT, fields)
    assert f"{USER}{NEXT}<|channel|>final<|message|>Hm.<|end|>{USER}" in prompt(gpt_oss, 0)
    assert "\nReasoning: medium\n" in prompt(gpt_oss)
