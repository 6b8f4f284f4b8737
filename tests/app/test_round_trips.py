"""Round trips: parsers read the answers that real models' chat templates render, and the same goes back."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from app.api.request.messages import written_calls
from app.parsers.base import assemble
from app.parsers.reading import Reading
from app.parsers.registry import reasoning_family, tool_family
from app.text.template import ChatTemplate
from tests.rigs.assets import template
from tests.rigs.parsers import parse
from tests.rigs.requests import CHAT
from tests.rigs.server import Server, know

FAMILIES = {
    # the family of calls, that of reasoning, and what ends a turn
    "deepseek-v3.1": ("deepseek_v31", "think", "<｜end▁of▁sentence｜>"),
    "deepseek-v3.2": ("deepseek_v32", "think", "<｜end▁of▁sentence｜>"),
    "deepseek-v4": ("deepseek_v4", "think", "<｜end▁of▁sentence｜>"),
    "glm-4.6": ("glm", "think", ""),
    "glm-4.7": ("glm", "think", ""),
    "gpt-oss": ("harmony", "harmony", "<|call|>"),
    "granite-3.3": ("granite", "think", "<|end_of_text|>\n"),
    "granite-4.0": ("hermes", None, "<|end_of_text|>\n"),
    "kimi-k2": ("kimi_k2", None, "<|im_end|>"),
    "minimax-m2": ("minimax_m2", "think", "[e~[\n"),
    "ministral-3": ("mistral", "mistral", "</s>"),
    "mistral-nemo": ("mistral", None, "</s>"),
    "qwen3": ("hermes", "think", "<|im_end|>\n"),
    "qwen3-coder": ("qwen3_coder", None, "<|im_end|>\n"),
    "seed-oss": ("seed_oss", "seed_oss", "<seed:eos>"),
}
NO_REASONING = {"deepseek-v3.1", "granite-3.3"}
"""Templates that leave out the reasoning of earlier answers."""
NO_TEXT = {"mistral-nemo"}
"""A template that leaves out text beside calls."""
PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "deep": {"type": "object"},
}
SCHEMA = {"type": "object", "properties": PROPERTIES}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "It.", "parameters": SCHEMA}}
    for name in ("weather", "now")
]
ARGUMENTS = {"city": 'Ósló "x" <b>\nline', "days": 3, "tags": ["a", "b"], "deep": {"x": [1, None, True]}}
USER = {"role": "user", "content": "hi"}


def asked(content: str, reasoning: str, calls: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    ids = ("abcdefgh1", "abcdefgh2")
    made = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id, (name, arguments) in zip(ids, calls, strict=False)
    ]
    message = {"role": "assistant", "content": content, "tool_calls": made}
    return message | ({"reasoning_content": reasoning} if reasoning else {})


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("content", "reasoning", "count"), [("", "hm\n\nhm", 1), ("I look.", "hm", 2)])
def test_an_answer_is_read_as_its_template_writes_it(
    name: str, content: str, reasoning: str, count: int
) -> None:
    source = template(name)
    tools, thinking = tool_family("auto", source), reasoning_family("auto", source)
    assert (tools and tools.name, thinking and thinking.name) == FAMILIES[name][:2] and tools is not None
    made = ChatTemplate(source, {"bos_token": "<s>", "eos_token": FAMILIES[name][2] or "</s>"})
    shown = TOOLS if made.shows_tools else None

    def rendered(*messages: dict[str, Any], prompt: bool) -> str:
        listed = list(messages)
        if made.drops_calls:
            listed = written_calls(listed, tools)
        arguments = {"tools": shown, "enable_thinking": True, "thinking": True}
        return made.render(listed, add_generation_prompt=prompt, **arguments)

    if name == "gpt-oss":  # one call is all it writes; text beside that is reasoning
        content, count = "", 1
    content = "" if name in NO_TEXT else content
    reasoning = "" if thinking is None or name in NO_REASONING else reasoning
    calls: list[tuple[str, dict[str, Any]]] = [("weather", ARGUMENTS), ("now", {})][:count]
    prompt = rendered(USER, prompt=True)
    whole = rendered(USER, asked(content, reasoning, calls), prompt=False)
    if name in NO_REASONING:
        prompt = prompt.removesuffix("<think>")  # for an answer that does not go on
        whole = whole.replace(prompt + "</think>", prompt)
    assert whole.startswith(prompt) and whole.endswith(FAMILIES[name][2])
    written = whole[len(prompt) :].removesuffix(FAMILIES[name][2])

    reading = Reading(
        tools=tools,
        reasoning=thinking,
        names=frozenset({"weather", "now"}),
        schemas={"weather": SCHEMA, "now": SCHEMA},
        inside=thinking is not None and thinking.opened(prompt),
    )
    for pieces in ([written], written):
        read = assemble(parse(reading.answer(), pieces))
        found = [(call.name, json.loads(call.arguments)) for call in read.calls]
        assert (read.content, read.reasoning, found) == (content, reasoning, calls), written
    back = rendered(USER, asked(read.content, read.reasoning, found), prompt=False)
    assert back == rendered(USER, asked(content, reasoning, calls), prompt=False)


async def test_calls_that_a_template_drops_are_in_the_content(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.rigs.engine.CONTEXT", 4096)
    know(server, "granite")
    made = ChatTemplate(template("granite-3.3"))
    server.service.ready(msgspec.structs.replace(server.service.loaded, template=made))
    history = [USER, asked("I look.", "", [("now", {"a": [1]})]), {"role": "tool", "content": "4°"}]
    await server.ask(CHAT, {"messages": history, "tools": TOOLS})
    call = '<|tool_call|>[{"name": "now", "arguments": {"a": [1]}}]'
    assert f"I look.{call}<|end_of_text|>" in server.engine.runs[-1].job.prompt


def test_templates_that_show_calls_beside_tools_only() -> None:
    call = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}"
    call += "{% endfor %}{% endfor %}"
    tools = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
    for source, drops in ((tools + call, False), (tools, True), (call, False), ("{{ messages }}", False)):
        assert ChatTemplate(source).drops_calls == drops, source
    conversation = [USER, asked("", "", [("now", {"a": 1})])]
    assert '{"a": 1}' in ChatTemplate(tools + call).render(conversation, tools=TOOLS)
