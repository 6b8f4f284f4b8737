"""gpt-oss' format: reasoning, text and calls as messages of channels, however the text is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.parsers.base import CallCut, Content, Reasoning, assemble
from app.parsers.grammar import Tool, Wanted, constraint
from app.parsers.harmony import BEGINS, ENDS, MESSAGE
from app.parsers.reading import Reading
from app.parsers.registry import REASONING, TOOLS, reasoning_family, tool_family
from core.grammar import GrammarSpec
from gpu.grammar.structural_tag_lark import lark_of
from tests.rigs.parsers import accepts, cuts, hermes, lines, parse, splits

TOOL, THINK = TOOLS["harmony"], REASONING["harmony"]
READING = Reading(tools=TOOL, reasoning=THINK, names=frozenset({"f", "now"}))
THOUGHT = "<|channel|>analysis<|message|>hm\n<|end|>"
NEXT = "<|start|>assistant"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
FINAL = "<|channel|>final<|message|>Yes.\n"
F = ("f", '{"a": 1}')

Told = tuple[str, str, list[tuple[str, str]]]


def told(text: str, reading: Reading = READING) -> Told:
    """Reasoning, content and calls: the same however the text is cut."""
    found = []
    for pieces in (*cuts(text), *splits(text)):
        message = assemble(parse(reading.answer(), pieces))
        calls = [(call.name, call.arguments) for call in message.calls]
        found.append((message.reasoning, message.content, calls))
    assert all(each == found[0] for each in found), text
    return found[0]


TEXTS: tuple[tuple[str, Told], ...] = (
    (THOUGHT + NEXT + FINAL, ("hm\n", "Yes.\n", [])),
    (THOUGHT + NEXT + FINAL + "<|return|>", ("hm\n", "Yes.\n", [])),
    (THOUGHT + NEXT + CALL, ("hm\n", "", [F])),
    (THOUGHT + NEXT + CALL + "<|call|>", ("hm\n", "", [F])),
    (THOUGHT + NEXT + CALL + " \n<|call|>\n", ("hm\n", "", [F])),
    (CALL, ("", "", [F])),
    (FINAL, ("", "Yes.\n", [])),
    # the recipient before the channel, and as the prompt's header goes on
    (f'{NEXT} to=functions.f<|channel|>commentary json<|message|>{{"a": 1}}', ("", "", [F])),
    (' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>', ("", "", [F])),
    ('<|channel|>commentary to=functions.f<|constrain|>json<|message|>{"a": 1}', ("", "", [F])),
    ('<|channel|>commentary to=functions.f<|message|>{"a": 1}', ("", "", [F])),
    ('<|channel|>analysis to=functions.f code<|message|>{"a": 1}', ("", "", [F])),
    ('<|channel|>commentary to=f<|message|>{"a": 1}', ("", "", [F])),
    # not declared: with the namespace a call all the same, as of every format with marks
    ("<|channel|>commentary to=functions.g<|message|>{}", ("", "", [("g", "{}")])),
    ("<|channel|>commentary to=g<|message|>{}", ("", "{}", [])),
    # text before calls, and several messages of a kind
    (
        f"{THOUGHT}{NEXT}<|channel|>commentary<|message|>I look.<|end|>{NEXT}{CALL}",
        ("hm\n", "I look.", [F]),
    ),
    (
        f"{THOUGHT}{NEXT}<|channel|>analysis<|message|>So<|end|>{NEXT}<|channel|>commentary<|message|>A"
        f"<|end|>{NEXT}{FINAL}",
        ("hm\n\nSo", "A\nYes.\n", []),
    ),
    (f"{CALL}<|call|>{NEXT}{CALL.replace('.f', '.now')}", ("", "", [F, ("now", F[1])])),
    # tools that the models were trained with
    (
        '<|channel|>analysis to=browser.search code<|message|>{"query": "x"}<|call|>',
        ('{"query": "x"}', "", []),
    ),
    ("<|channel|>commentary to=python<|message|>print(1)", ("print(1)", "", [])),
    # malformed: nothing is lost
    ("Yes.", ("", "Yes.", [])),
    (" to be or not", ("", " to be or not", [])),
    ("to=functions is a text", ("", "to=functions is a text", [])),
    ("<|channel|>thoughts<|message|>Yes.", ("", "Yes.", [])),
    ("<|message|>Yes.", ("", "<|message|>Yes.", [])),
    (f"{NEXT}<|message|>Yes.", ("", "Yes.", [])),
    ("<|channel|>analysis<|message|>hm<|channel|>final<|message|>Yes.", ("hm", "Yes.", [])),
    (f"<|channel|>analysis<|message|>hm{NEXT}<|channel|>final<|message|>Yes.", ("hm", "Yes.", [])),
    ("<|channel|>analysis<|channel|>final<|message|>Yes.", ("", "Yes.", [])),
    (f"{NEXT}<|end|>{NEXT}{FINAL}", ("", f"{NEXT}<|end|>Yes.\n", [])),
    (
        "<|channel|>final<|message|>a <|b <|sta <|message|> c<|sta",
        ("", "a <|b <|sta <|message|> c<|sta", []),
    ),
    ("<|channel|>I do not <|end|> know", ("", "<|channel|>I do not <|end|> know", [])),
    (f"<|channel|>{'no ' * 200}<|message|>x", ("", f"<|channel|>{'no ' * 200}<|message|>x", [])),
    (
        "<|channel|>commentary to=functions.f<|message|>{'a': 1}<|call|>",
        ("", "<|channel|>commentary to=functions.f<|message|>{'a': 1}", []),
    ),
    (
        f"<|channel|>commentary to=functions.f<|message|>print(1)<|call|>{NEXT}{FINAL}",
        ("", "<|channel|>commentary to=functions.f<|message|>print(1)Yes.\n", []),
    ),
    (f"{CALL[:-1]}, b}}<|call|>{NEXT}{CALL}", ("", f"{CALL[:-1]}, b}}", [F])),
    # the end of the tokens
    ("<|channel|>analysis<|message|>h", ("h", "", [])),
    (THOUGHT, ("hm\n", "", [])),
    (f"{THOUGHT}{NEXT}<|channel|>fin", ("hm\n", "", [])),
    (f"{THOUGHT}{NEXT}<|channel|>commentary to=functions.f <|constrain|>js", ("hm\n", "", [])),
    (f"{THOUGHT}{NEXT} to=func", ("hm\n", "", [])),
    (f"{THOUGHT}<|sta", ("hm\n", "", [])),
    ("<|channel|>commentary to=functions.f<|message|>", ("", "", [("f", "")])),
    ('<|channel|>commentary to=functions.f<|message|>{"a": [', ("", "", [("f", '{"a": [')])),
    ("", ("", "", [])),
    (" \n ", ("", " \n ", [])),
)


def test_headers_that_are_none_take_no_time() -> None:
    """This one would be read for centuries if all ways to divide it were tried."""
    text = "<|channel|>aaaaaaaaaa" * 10 + "!<|message|>x"
    message = assemble(parse(READING.answer(), [text]))
    assert (message.content, message.reasoning) == (text, "")


@pytest.mark.parametrize(("text", "wanted"), TEXTS)
def test_messages_are_told_apart(text: str, wanted: Told) -> None:
    assert told(text) == wanted


@pytest.mark.parametrize(("text", "wanted"), TEXTS)
def test_reasoning_in_the_content_or_left_out(text: str, wanted: Told) -> None:
    reasoning, content, calls = wanted
    silent = Reading(tools=TOOL, reasoning=THINK, names=READING.names, silent=True)
    assert told(text, silent) == ("", content, calls)
    inline = Reading(tools=TOOL, reasoning=THINK, names=READING.names, inline=True)
    found = told(text, inline)
    assert found[0] == "" and found[2] == calls
    assert calls or found[1] == text, "every character, marks too"
    # Without a reasoning parser all but calls is text to the last character.
    plain = told(text, Reading(tools=TOOL, names=READING.names))
    assert plain[0] == "" and all(call in plain[2] for call in calls if call[1])
    assert plain[2] or plain[1] == text
    # Without a parser of calls they are text: that of a message, without its marks.
    alone = told(text, Reading(reasoning=THINK))
    assert alone[0].startswith(reasoning) and alone[2] == []
    assert all(arguments in alone[0] + alone[1] for _, arguments in calls)


def test_a_prompt_within_a_message() -> None:
    inside = Reading(tools=TOOL, reasoning=THINK, names=READING.names, inside=True)
    assert told(f"hm<|end|>{NEXT}{CALL}", inside) == ("hm", "", [F])
    assert told("hm", inside) == ("hm", "", [])
    assert told(FINAL, inside) == ("", "Yes.\n", [])
    assert told("I think so.<|return|>") == ("", "I think so.", [])  # the final message


def test_calls_of_another_format_are_read_in_the_text() -> None:
    """The template renders no tools: they were described as Hermes'."""
    reading = Reading(tools=TOOLS["hermes"], reasoning=THINK, names=READING.names)
    text = f"{THOUGHT}{NEXT}<|channel|>final<|message|>A {hermes([('f', {'a': 1})])}<|return|>"
    assert told(text, reading) == ("hm\n", "A ", [F])


def test_where_reasoning_is_and_when_it_is_over() -> None:
    answer = READING.answer()
    for text, thinking, settled in (
        ("<|channel|>analysis", False, False),
        ("<|message|>", True, False),
        ("hm", True, False),
        ("<|end|>", False, True),
        (NEXT, False, True),
        ("<|channel|>final<|message|>", False, True),
    ):
        answer.feed(text)
        assert (answer.thinking, answer.settled) == (thinking, settled), text
    answer = READING.answer()
    answer.feed(FINAL)
    assert answer.settled and not answer.plain
    assert READING.answer().feed("<|channel|>final<|message|>a b") == [Content("a b")]
    assert READING.answer().feed("<|channel|>analysis<|message|>a b") == [Reasoning("a b")]


def test_one_call_is_enough() -> None:
    reading = Reading(tools=TOOL, reasoning=THINK, names=READING.names, one=True)
    for pieces in cuts(f"{THOUGHT}{NEXT}{CALL}<|call|>{NEXT}{CALL}<|call|>{NEXT}{FINAL}"):
        answer = reading.answer()
        message = assemble(parse(answer, pieces))
        assert len(message.calls) == 1 and (message.reasoning, message.content) == ("hm\n", "")
        assert answer.done and answer.whole == 1


@pytest.mark.parametrize("begin", ["", f"{THOUGHT}{NEXT}"])
@pytest.mark.parametrize("names", [frozenset({"f"}), frozenset({"f", "now"})])
def test_a_forced_call_is_one_wherever_it_is_cut(begin: str, names: frozenset[str]) -> None:
    reading = Reading(tools=TOOL, reasoning=THINK, names=names, forced=True)
    text = begin + CALL
    for end in range(1, len(text) + 1):
        reasoning, content, calls = told(text[:end], reading)
        assert content == "" and len(calls) <= 1 and "hm\n<|end|>".startswith(reasoning)
        assert calls or len(names) > 1 or end <= len(begin) + len("<|channel|>")
        assert all(name == "f" and '{"a": 1}'.startswith(arguments) for name, arguments in calls)


PARTS = [
    *BEGINS,
    *ENDS,
    MESSAGE,
    *(NEXT, "<|constrain|>", "analysis", "commentary", "final", " to=functions.f ", "to=python", "to=f"),
    *("json", '{"a": 1}', '{"a": [', "}", "x", " ", "\n", "<", "<|", "|>", "<|channel|>final<|message|>"),
    *(CALL, THOUGHT, FINAL),
]


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(st.sampled_from(PARTS), max_size=14),
    seed=st.integers(0, 99),
    calls=st.booleans(),
    inside=st.booleans(),
    forced=st.booleans(),
)
@example(parts=["<|channel|>", " " * 250, "x", " " * 3], seed=0, calls=True, inside=False, forced=False)
def test_no_text_makes_the_parser_fail_or_depend_on_the_cuts(
    parts: list[str], seed: int, calls: bool, inside: bool, forced: bool
) -> None:
    text = "".join(parts)
    tools = TOOL if calls else None
    names = READING.names
    reading = Reading(tools=tools, reasoning=THINK, names=names, inside=inside, forced=forced and calls)
    whole = parse(reading.answer(), [text])
    message = assemble(whole)
    found = [(call.name, call.arguments) for call in message.calls]
    cut = any(isinstance(event, CallCut) for event in whole)
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in found[: -1 if cut else None])
    for pieces in cuts(text, seed) if text else ():
        other = assemble(parse(reading.answer(), pieces))
        assert (other.reasoning, other.content) == (message.reasoning, message.content)
        assert [(call.name, call.arguments) for call in other.calls] == found
    inline = Reading(tools=tools, reasoning=THINK, names=names, inside=inside, inline=True)
    raw = assemble(parse(inline.answer(), [text]))
    assert raw.calls or raw.content == text
    # All that is no mark and in no header is told.
    said = message.reasoning + message.content + "".join(arguments for _, arguments in found)
    assert forced or said.count("x") == text.count("x") or MESSAGE not in text or "x" not in text


@pytest.mark.parametrize(
    "filling", ["<", "<|channel|>", NEXT, " ", "<|end|>", "x", THOUGHT, CALL + "<|call|>"]
)
def test_work_is_linear(filling: str) -> None:
    def work(size: int, opening: str) -> int:
        return lines(lambda: parse(READING.answer(), (opening + filling * size)[:size]))

    for opening in ("", "<|channel|>analysis<|message|>", "<|channel|>", " to=f<|channel|>"):
        assert work(4_000, opening) < 4.5 * work(1_000, opening) + 9_000


# -- families, prompts, grammars -------------------------------------------------------------------


def test_marks_in_a_template_choose_the_family() -> None:
    template = '{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}'
    assert (tool_family("auto", template), reasoning_family("auto", template)) == (TOOL, THINK)
    phi = "{{ '<|assistant|>' + message['content'] + '<|end|>' }}"
    assert tool_family("auto", phi) is not TOOL and reasoning_family("auto", phi) is None


def test_prompts_that_open_or_close_the_reasoning() -> None:
    begin = f"<|start|>user<|message|>hi<|end|>{NEXT}"
    opened, empty = f"{begin}<|channel|>analysis<|message|>", f"{THINK.begin}<|end|>{NEXT}"
    assert THINK.opened(opened) and not THINK.opened(begin) and not THINK.closed(begin)
    for prompt in (begin, opened):
        assert THINK.skipped(prompt, calls=True) == begin + empty
        assert THINK.skipped(prompt) == f"{begin}{empty}<|channel|>final<|message|>"
    for closed in (
        begin + empty,
        f"{begin}<|channel|>final<|message|>",
        f"{begin}<|channel|>final<|message|>No",
    ):
        assert THINK.closed(closed) and THINK.skipped(closed) == closed


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
STRICT = Tool("f", SCHEMA, True)
LOOSE = Tool("now", {"type": "object", "properties": {}})
ANSWER = GrammarSpec("json_schema", json.dumps({**SCHEMA, "properties": {"a": {"type": "string"}}}))
BEFORE = f"<|channel|>commentary<|message|>I look.<|end|>{NEXT}"
WRITTEN = {
    "final": FINAL,
    "json": '<|channel|>final<|message|>{"a": "x"}',
    "bare json": '{"a": "x"}',
    "call": CALL,
    "now": CALL.replace(".f", ".now").replace('{"a": 1}', "{}"),
    "preamble": BEFORE + CALL,
    "thought final": THOUGHT + NEXT + FINAL,
    "thought json": f'{THOUGHT}{NEXT}<|channel|>final<|message|>{{"a": "x"}}',
    "thought call": THOUGHT + NEXT + CALL,
    "thought preamble": THOUGHT + NEXT + BEFORE + CALL,
    "open call": f"hm\n<|end|>{NEXT}{CALL}",
    "open json": f'hm\n<|end|>{NEXT}<|channel|>final<|message|>{{"a": "x"}}',
    # never right
    "bad call": CALL.replace("1", '"x"'),
    "unknown": CALL.replace(".f", ".g"),
    "bad thought call": THOUGHT + NEXT + CALL.replace("1", '"x"'),
    "two thoughts": THOUGHT + NEXT + THOUGHT,
    "two calls": f"{CALL}<|call|>{NEXT}{CALL}",
    "only thought": THOUGHT,
    "call in thought": f"<|channel|>analysis<|message|>{CALL}<|end|>{NEXT}{CALL}",
    "bad json": '<|channel|>final<|message|>{"a": 1}',
}


@pytest.mark.parametrize(
    ("fields", "right"),
    [
        (
            {"calls": "required", "thinking": "possible"},
            {"call", "now", "thought call"},
        ),
        ({"calls": "required"}, {"call", "now"}),
        ({"calls": "required", "thinking": "open"}, {"open call"}),
        (
            {"calls": "auto", "thinking": "possible"},
            {"final", "json", "call", "now", "preamble", "thought final", "thought json", "thought call"}
            | {"thought preamble", "bad json"},
        ),
        (
            {"calls": "auto", "thinking": "possible", "answer": ANSWER},
            {"json", "call", "now", "thought json", "thought call"},
        ),
        ({"calls": "auto", "thinking": "open", "answer": ANSWER}, {"open json", "open call"}),
        ({"thinking": "possible", "answer": ANSWER, "tools": ()}, {"json", "thought json"}),
        ({"thinking": "open", "answer": ANSWER, "tools": ()}, {"open json"}),
    ],
)
def test_a_grammar_is_about_the_answers_messages(fields: dict[str, Any], right: set[str]) -> None:
    wanted = Wanted(**{"tools": (STRICT, LOOSE), **fields})
    spec = constraint(wanted, TOOL if wanted.tools else None, THINK)
    assert spec is not None
    assert {name for name, text in WRITTEN.items() if accepts(spec, text)} == right
    # The faster library takes it, the marks as tokens.
    tokens = {mark: at for at, mark in enumerate((*BEGINS, *ENDS, MESSAGE, "<|constrain|>"))}
    assert MESSAGE not in lark_of(json.loads(spec.text), tokens, lambda part: json.dumps(part.schema))
    if wanted.calls == "required":
        for name in right - {"open call"}:
            assert len(told(WRITTEN[name])[2]) == 1


def test_a_grammar_where_the_prompt_has_begun_the_answer() -> None:
    """Reasoning that was cut or skipped: then the prompt ends in the final message, unless calls may come."""
    assert constraint(Wanted(answer=ANSWER), None, THINK) is ANSWER
    spec = constraint(Wanted(answer=ANSWER, tools=(LOOSE,), calls="auto"), TOOL, THINK)
    assert spec is not None
    assert {name for name, text in WRITTEN.items() if accepts(spec, text)} == {"json", "now"}
    assert constraint(Wanted(tools=(LOOSE,), calls="auto", thinking="possible"), TOOL, THINK) is None


def test_calls_of_another_format_are_part_of_the_final_message() -> None:
    spec = constraint(Wanted(tools=(STRICT,), calls="required", thinking="possible"), TOOLS["hermes"], THINK)
    assert spec is not None
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert accepts(spec, f"{THOUGHT}{NEXT}<|channel|>final<|message|>{call}") and not accepts(spec, call)
