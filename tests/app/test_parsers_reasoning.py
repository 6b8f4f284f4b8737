"""Thinking apart from the answer, and families told from their templates."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.parsers.base import Content, Event, Reasoning, assemble
from app.parsers.reading import Reading
from app.parsers.reasoning import ReasoningParser
from app.parsers.registry import REASONING, TOOLS, reasoning_family, tool_family
from tests.rigs.assets import asset
from tests.rigs.parsers import cuts, hermes, lines, parse, splits

THINK = REASONING["think"]


def thinking(inside: bool) -> ReasoningParser:
    return ReasoningParser(THINK.begins, THINK.ends, inside=inside)


TEXTS = (
    # text, inside from the start, reasoning, content
    ("<think>\nhm\n</think>\n\nYes.", False, "hm", "Yes."),
    ("\n <think>hm</think>Yes.", False, "hm", "Yes."),
    ("hm\n\nwell\n</think>\n\nYes.\n", True, "hm\n\nwell", "Yes.\n"),
    ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
    ("</think>Yes.", True, "", "Yes."),
    ("Yes.", False, "", "Yes."),
    ("  Yes <think>no</think>", False, "", "  Yes <think>no</think>"),
    ("<thinking>", False, "", "<thinking>"),
    ("<think", False, "", "<think"),
    ("<think>a < b </ c </thin k>\n", False, "a < b </ c </thin k>\n", ""),
    ("<think>a</think>b</think>c", False, "a", "b</think>c"),
    (" \n ", False, "", " \n "),
    ("", False, "", ""),
)


@pytest.mark.parametrize(("text", "inside", "reasoning", "content"), TEXTS)
def test_thinking_is_told_apart(text: str, inside: bool, reasoning: str, content: str) -> None:
    for pieces in cuts(text):
        message = assemble(parse(thinking(inside), pieces))
        assert (message.reasoning, message.content) == (reasoning, content)
        inline = assemble(parse(Reading(reasoning=THINK, inside=inside, inline=True).answer(), pieces))
        assert (inline.reasoning, inline.content) == ("", text)
        silent = assemble(parse(Reading(reasoning=THINK, inside=inside, silent=True).answer(), pieces))
        assert (silent.reasoning, silent.content) == ("", content)


OTHER_TEXTS = (
    ("granite", "Here is my thought process:\nhm\n\nHere is my response:\n\nYes.", "hm", "Yes."),
    ("granite", "Here's my thought process: hm Here's my response: Yes.", " hm ", " Yes."),
    ("granite", "Here is my thought process:hm\nHere's my response:A Here is", "hm", "A Here is"),
    ("granite", "Here is my response: Yes.", "", "Here is my response: Yes."),
    ("granite", "Here is", "", "Here is"),
    ("granite", "Here is my thought process: hm\nHere is my", " hm\nHere is my", ""),
    ("gemma4", "<|channel>thought\nhm\n<channel|>Yes. <channel|>", "hm", "Yes. <channel|>"),
    ("gemma4", "<|channel>thought\n<channel|>Yes.", "", "Yes."),
    ("gemma4", "<|channel>thought\nhm", "hm", ""),
)


@pytest.mark.parametrize(("family", "text", "reasoning", "content"), OTHER_TEXTS)
def test_reasoning_between_other_marks(family: str, text: str, reasoning: str, content: str) -> None:
    for pieces in (*cuts(text), *splits(text)):
        message = assemble(parse(Reading(reasoning=REASONING[family]).answer(), pieces))
        assert (message.reasoning, message.content) == (reasoning, content)
        inline = assemble(parse(Reading(reasoning=REASONING[family], inline=True).answer(), pieces))
        assert (inline.reasoning, inline.content) == ("", text)


def test_thinking_comes_as_it_is_written() -> None:
    parser = thinking(False)
    assert parser.feed("<think>\nLet") == [Reasoning("Let")] and parser.inside
    assert parser.feed(" me\n\n") == [Reasoning(" me")]
    assert parser.feed("see </thi") == [Reasoning("\n\nsee ")]
    assert parser.feed("nk>\n\nS") == [Content("S")] and not parser.inside


@given(st.text("<think>/ \nab", max_size=30), st.booleans(), st.integers(0, 99))
def test_the_cuts_do_not_matter(text: str, inside: bool, seed: int) -> None:
    def told(events: list[Event]) -> tuple[str, str]:
        message = assemble(events)
        return message.reasoning, message.content

    whole = told(parse(thinking(inside), [text]))
    for pieces in cuts(text, seed) if text else ():
        assert told(parse(thinking(inside), pieces)) == whole


@pytest.mark.parametrize("filling", ["<", "\n", " ", "</think", "a\n"])
def test_work_is_linear(filling: str) -> None:
    def work(size: int, inside: bool) -> int:
        return lines(lambda: parse(thinking(inside), (filling * size)[:size]))

    for inside in (False, True):
        assert work(4_000, inside) < 4.5 * work(1_000, inside) + 200


def test_calls_are_read_behind_the_thinking_only() -> None:
    call = hermes([("f", {"a": 1})])
    reading = Reading(reasoning=THINK, tools=TOOLS["hermes"], names=frozenset({"f"}))
    for pieces in cuts(f"<think>\nI could {call}\n</think>\n\n{call}"):
        message = assemble(parse(reading.answer(), pieces))
        assert message.reasoning == f"I could {call}" and message.content == ""
        assert [(one.name, one.arguments) for one in message.calls] == [("f", '{"a": 1}')]


def test_calls_in_a_thinking_that_never_ends_are_found() -> None:
    call = hermes([("f", {"a": 1})])
    for inside, begin in ((False, "<think>\n"), (True, "")):
        for inline, silent in ((False, False), (True, False), (False, True)):
            reading = Reading(
                reasoning=THINK, tools=TOOLS["hermes"], inside=inside, inline=inline, silent=silent
            )
            for pieces in (*cuts(text := f"{begin}Hm.\n{call}\n{call}"), *splits(text)):
                message = assemble(parse(reading.answer(), pieces))
                assert [one.arguments for one in message.calls] == ['{"a": 1}'] * 2
                thought = "" if inline or silent else "Hm."
                assert (message.reasoning, message.content) == (thought, begin + "Hm.\n" if inline else "")
    reading = Reading(reasoning=THINK, tools=TOOLS["hermes"])
    for pieces in cuts(f"<think>Hm.\n{call[:-20]}"):
        message = assemble(parse(reading.answer(), pieces))
        assert [one.arguments for one in message.calls] == ['{"a": 1}'] or message.calls[0].name == "f"


def test_a_thinking_that_never_ends_and_only_speaks_of_calls_is_one() -> None:
    reading = Reading(reasoning=THINK, tools=TOOLS["hermes"])
    for text in (
        "Hm.\n<tool_call> is what I write",
        "Hm.\n<tool_call>",
        "Hm.\n<tool",
        "Hm.\n<tool_call></thi",
    ):
        for pieces in splits("<think>" + text):
            message = assemble(parse(reading.answer(), pieces))
            assert (message.reasoning, message.content, message.calls) == (text, "", [])
    for pieces in splits("<think>Hm.\n<tool_call> </thi </think>\nYes."):
        message = assemble(parse(reading.answer(), pieces))
        assert (message.reasoning, message.content) == ("Hm.\n<tool_call> </thi ", "Yes.")


def test_one_call_is_enough() -> None:
    reading = Reading(tools=TOOLS["hermes"], one=True)
    for pieces in cuts("a " + hermes([("f", {"a": 1}), ("g", {})]) + " b"):
        answer = reading.answer()
        message = assemble(parse(answer, pieces))
        assert [call.name for call in message.calls] == ["f"] and message.content == "a "
        assert answer.done and answer.made == 1


# -- families --------------------------------------------------------------------------------------


def source(name: str) -> str:
    settings = json.loads((asset("tokenizers") / name / "tokenizer_config.json").read_bytes())
    return str(settings["chat_template"])


def test_real_templates_say_of_which_family_they_are() -> None:
    families = {name: source(name) for name in ("qwen3", "llama3_1", "deepseek_v3")}
    tools = {name: tool_family("auto", text) for name, text in families.items()}
    assert {name: family and family.name for name, family in tools.items()} == {
        "qwen3": "hermes",
        "llama3_1": "hermes",  # this one leaves tools out
        "deepseek_v3": "deepseek_v3",
    }
    reasoning = {name: reasoning_family("auto", text) for name, text in families.items()}
    assert [name for name, family in reasoning.items() if family is not None] == ["qwen3"]


@pytest.mark.parametrize(
    ("text", "tools", "reasoning"),
    [
        ("", "hermes", None),
        ("{{ messages }}", "hermes", None),
        ("<tool_call>\n<function=name>", "qwen3_coder", None),
        ("<tool_call>{name}\n<arg_key>", "glm", None),
        ("<|tool_calls_section_begin|><|tool_call_begin|>", "kimi_k2", None),
        ("<start_function_declaration> <start_function_call>call:", "functiongemma", None),
        ("<|tool>declaration: <|tool_call>call: <|channel>thought\n<channel|>", "gemma4", "gemma4"),
        ("Use <function_call> for each", "granite-20b-fc", None),
        ("respond only with <|tool_call|> followed by a JSON list", "granite", None),
        ("respond with <tool_call> followed by a JSON list of tools used", "granite", None),
        ("Write your response after 'Here is my response:'. <|tool_call|>", "granite", "granite"),
        ('formatted as functools[{"name": [function name]', "phi4_mini_json", None),
        ("'<|tool|>' + message['tools'] + '<|/tool|>'", "phi4_mini_json", None),
        ("'<|tool|>' + tool + '<|/tool|>' <|tool_call|>{}<|/tool_call|>", "phi4_mini_json", None),
        ("within <function_calls></function_calls> XML tags", "olmo3", None),
        ("<minimax:tool_call> </think>", "minimax_m2", "think"),
        ("<｜DSML｜function_calls>", "deepseek_v32", None),
        ("{% set dsml = '｜DSML｜' %}{{ '</' + dsml + 'tool_calls>' }}", "deepseek_v4", None),
        ("<seed:tool_call>\n<function=name></seed:think>", "seed_oss", "seed_oss"),
        ("<｜tool▁calls▁begin｜> <｜tool▁sep｜>", "deepseek_v31", None),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral", None),
        ("[TOOL_CALLS] [THINK][/THINK]", "mistral", "mistral"),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', "llama3", None),
        ("<|python_tag|>", "llama3", None),
        ("[func_name1(params_name1=params_value1)] <|python_tag|>", "pythonic", None),
        ("{{ content.split('</think>')[-1] }}<｜tool▁calls▁begin｜>", "deepseek_v3", "think"),
    ],
)
def test_marks_in_a_template_choose_the_families(text: str, tools: str | None, reasoning: str | None) -> None:
    found = tool_family("auto", text), reasoning_family("auto", text)
    assert [family and family.name for family in found] == [tools, reasoning]
    assert tool_family("none", text) is None and reasoning_family("none", text) is None
    named = tool_family("llama3", text), reasoning_family("think", text)
    assert [family and family.name for family in named] == ["llama3", "think"]


def test_prompts_that_open_or_close_the_thinking() -> None:
    assert THINK.opened("user: x\nassistant: <think>\n") and not THINK.closed("<think>\n")
    assert THINK.closed("<think>\n\n</think>\n\n") and not THINK.opened("<think></think>")
    for prompt in ("assistant: <think>\n", "assistant: <think>\n\n</think>\n\n", "assistant: "):
        assert THINK.skipped(prompt) == "assistant: <think>\n\n</think>\n\n"
