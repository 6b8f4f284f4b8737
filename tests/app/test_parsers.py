"""Calls in every family's format, however the text is cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.parsers.base import CallArguments, CallStart, Content, assemble
from app.parsers.calls import CallParser
from app.parsers.json_scan import JsonScanner
from app.parsers.registry import TOOLS
from tests.rigs.calls import (
    LEADS,
    NAMES,
    SCHEMAS,
    WRITERS,
    deepseek_31,
    dsml,
    kimi,
    parser,
    pythonic_tagged,
    qwen_coder_bare,
    read,
)
from tests.rigs.parsers import Made, cuts, hermes, lines, parse, splits

ARGUMENTS = (
    {},
    {"a": 1},
    {"text": 'a "quoted" \\ line\nand\ttab', "nested": {"list": [1, -2.5e-3, True, False, None, "x"]}},
    {"é": "日本語 😀 \u2028", "tags": "</tool_call> <tool_call> ``` [TOOL_CALLS] [ARGS] ); } ] ' \" "},
    {"json": '{"name": "f", "arguments": {}}', "empty": "", "deep": [[[[{"a": {"b": []}}]]]]},
)


@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.__name__)
@pytest.mark.parametrize("around", ["", "text"])
def test_calls_are_read_however_the_text_is_cut(writer: Callable[[Made], str], around: str) -> None:
    made: Made = [("f" if i % 2 else "get_weather", args) for i, args in enumerate(ARGUMENTS)]
    for calls in ([made[0]], [made[2]], made):
        before = "Let me look. <tool" if around else ""
        after = "Done." if around else ""
        text = f"{before}\n\n{writer(calls)}\n{after}" if before else f"{writer(calls)}\n{after}"
        lead = LEADS.get(WRITERS[writer], "")
        wanted = before + "\n\n".removesuffix(lead) + "\n" + after if around else ""
        for pieces in cuts(text):
            content, read_calls = read(WRITERS[writer], pieces)
            assert [(name, json.loads(arguments)) for name, arguments in read_calls] == calls
            assert content == wanted


def test_python_marks_around_a_list_are_no_content() -> None:
    for pieces in cuts("Well.\n" + pythonic_tagged([("f", {"a": 'b"'})])):
        assert read("pythonic", pieces) == ("Well.\n", [("f", '{"a": "b\\""}')])


def test_a_mark_in_a_string_is_no_call() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "<tool_call>{}</tool_call>"}}</tool_call>'
    assert read("hermes", [text]) == ("", [("f", '{"a": "<tool_call>{}</tool_call>"}')])


@pytest.mark.parametrize(
    ("family", "text", "content", "names"),
    [
        ("mistral", '[TOOL_CALLS] {"name": "f", "arguments": {"a": 1}}', "", "f"),
        ("mistral", 'Hm. [TOOL_CALLS]{"name": "f", "arguments": {}}\n{"name": "g"} So.', "Hm.  So.", "fg"),
        ("llama3", 'Sure: {"name": "f", "parameters": {}}', "Sure: ", "f"),
        ("llama3", 'A\n\n{"type": "function", "name": "f"}; {"name": "f"} B', "A\n\n B", "ff"),
        ("llama3", 'A {\n  "name": "f",\n  "parameters": {}\n}\n', "A ", "f"),
        ("llama3", 'A {"name": "f"}; then B', "A ; then B", "f"),
        ("pythonic", "see [f(a=1)]", "see ", "f"),
        ("pythonic", "So [1] [f(x) for x in y]:\n[f(), f(b=[2])] ok", "So [1] [f(x) for x in y]:\n ok", "ff"),
        ("granite", 'Let me see.\n<|tool_call|> [{"name": "f"}]\n\nSo.', "Let me see.\n\n\nSo.", "f"),
        ("granite", '<tool_call>[{"name": "f"}, {"name": "g"}', "", "fg"),
        ("granite-20b-fc", 'A <function_call>{"name": "f"}\n<function_call> {"name": "g"}B', "A B", "fg"),
        ("phi4_mini_json", ' functools[{"name": "f", "parameters": {"a": [[1], "]"]}}]', "", "f"),
        ("phi4_mini_json", '<|tool_call|>[{"name": "f"}, {"name": "g"}]<|/tool_call|>', "", "fg"),
        ("phi4_mini_json", 'A functools[\n  {"name": "f"},\n  {"name": "g"}\n]\n', "A ", "fg"),
        ("olmo3", "<function_calls>\n\n  f(a=true)  \n\n\tg()\n</function_calls>", "", "fg"),
        ("olmo3", "A <function_calls>f(), g()\n", "A ", "fg"),
        ("olmo3", "<function_calls>f()\nSo be it", "\nSo be it", "f"),
        ("deepseek_v31", deepseek_31([("f", {}), ("g", {"a": 1})]), "", "fg"),
        ("minimax_m2", 'A\n<invoke name="f">\n</invoke> B', "A B", "f"),
        ("deepseek_v32", f"A\n\n\n{dsml([('f', {})])}\n\nB", "A\n\n\nB", "f"),
        ("deepseek_v32", f"A\n\n<B\n{dsml([('f', {})])}", "A\n\n<B", "f"),
        ("hermes", ' \n<tool_call>{"name": "f"}</tool_call>\n\n', "", "f"),
        ("hermes", 'A\n\n<tool_call>{"name": "f"}</tool_call> B ', "A\n B ", "f"),
        ("hermes", 'A <tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "f"}', "A ", "ff"),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>\n<tool_ca', "", "f"),
        ("hermes", '<tool_call>{"name": "f"}\nSo.', "\nSo.", "f"),
    ],
)
def test_calls_amid_text(family: str, text: str, content: str, names: str) -> None:
    for pieces in (*cuts(text), *splits(text)):
        found, calls = read(family, pieces)
        assert (found, "".join(name for name, _ in calls)) == (content, names)


def test_a_call_without_its_outer_tag_is_one_where_the_function_is_declared() -> None:
    made: Made = [("f", {"text": "x"}), ("get_weather", {})]
    for pieces in cuts(f"Hm.\n{qwen_coder_bare(made)}\nSo."):
        content, calls = read("qwen3_coder", pieces)
        assert content == "Hm.\nSo." and [(name, json.loads(args)) for name, args in calls] == made
    assert read("qwen3_coder", ["<function=g>\n</function>"]) == ("<function=g>\n</function>", [])


def test_kimis_calls_keep_the_ids_that_the_model_gave_them() -> None:
    message = assemble(parse(parser("kimi_k2"), kimi([("f", {"a": 1}), ("get_weather", {})])))
    assert [call.id for call in message.calls] == ["functions.f:0", "functions.get_weather:1"]


def test_arguments_come_as_they_are_written() -> None:
    family = parser("hermes")
    events = family.feed('Hm <tool_call>{"name": "f", "arguments": {"a"')
    assert [type(event) for event in events] == [Content, CallStart, CallArguments]
    assert events[1].name == "f" and events[2].text == '{"a"'
    assert [event.text for event in family.feed(': "b')] == [': "b']
    assert [event.text for event in family.feed('c"}')] == ['c"}']
    assert family.feed("}\n</tool_") == [] and family.feed("call>\n") == [] and family.finish() == []


def test_marks_are_held_back_no_longer_than_they_may_be_one() -> None:
    family = parser("hermes")
    assert family.feed("a <tool_") == [Content("a ")]
    assert family.feed("box> b") == [Content("<tool_box> b")]
    assert family.feed(" <<") == [Content(" <")]
    assert family.feed("\n") == [Content("<")] and family.finish() == [Content("\n")]


def test_ids_are_unique_and_look_like_openais() -> None:
    message = assemble(parse(parser("hermes"), [hermes([("f", {})] * 50)]))
    ids = {call.id for call in message.calls}
    assert len(ids) == 50
    assert all(id[:5] == "call_" and len(id) == 29 and int(id[5:], 16) >= 0 for id in ids)


# -- properties ------------------------------------------------------------------------------------


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)


texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)


values = st.recursive(
    scalars | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


words = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=8)


made = st.lists(
    st.tuples(st.sampled_from(sorted(NAMES)), st.dictionaries(words, values, max_size=3)),
    min_size=1,
    max_size=3,
)


@settings(max_examples=60, deadline=None)
@given(calls=made, writer=st.sampled_from(list(WRITERS)), seed=st.integers(0, 99))
def test_any_arguments_survive(calls: Made, writer: Callable[[Made], str], seed: int) -> None:
    for pieces in cuts(writer(calls), seed):
        content, found = read(WRITERS[writer], pieces)
        assert content == "" and [(name, json.loads(arguments)) for name, arguments in found] == calls


@settings(max_examples=200, deadline=None)
@given(value=values, junk=st.sampled_from(["", " ", ",", "}", "x"]), seed=st.integers(0, 99))
def test_the_scanner_ends_where_the_value_does(value: Any, junk: str, seed: int) -> None:
    text = json.dumps(value)
    for pieces in cuts(text + junk, seed):
        scanner, taken = JsonScanner(), 0
        for piece in pieces:
            taken += scanner.scan(piece)
            if scanner.done or scanner.failed:
                break
        assert not (scanner.failed and junk in ("", " ", ","))
        if scanner.done:
            assert taken == len(text)


@settings(max_examples=300, deadline=None)
@given(text=st.text('{}[]:,"\\u0aeE+-.1 \ntrfalsn', max_size=12))
def test_the_scanner_takes_what_a_decoder_takes(text: str) -> None:
    scanner = JsonScanner()
    end = scanner.scan(text + " ,")
    try:
        json.loads(text)
        valid = text.strip(" \n") == text and "\t" not in text
    except ValueError:
        valid = False
    if valid:
        assert scanner.done and end == len(text)
    elif scanner.done:
        json.loads(text[:end])


# -- work ------------------------------------------------------------------------------------------


OPENINGS = {
    "hermes": '<tool_call>{"name": "f", "arguments": ',
    "llama3": '{"name": "f", "parameters": ',
    "mistral": "[TOOL_CALLS]f[ARGS]",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n",
    "pythonic": "[f(a=",
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n",
    "glm": "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>f:0<|tool_call_argument_begin|>",
    "gemma4": "<|tool_call>call:f{a:",
    "olmo3": "<function_calls>f(a=",
}


@pytest.mark.parametrize("family", OPENINGS)
@pytest.mark.parametrize("filling", ["{", "<", '{"', "[", " ", "\n", "<tool_call>", '{"a": "', "<｜tool▁"])
def test_work_is_linear_in_the_text(family: str, filling: str) -> None:
    def work(size: int, opening: str) -> int:
        text = (opening + filling * (size // len(filling)))[:size]
        return lines(lambda: parse(parser(family), text))

    for opening in ("", OPENINGS[family], OPENINGS[family] + '{"a": "', OPENINGS[family] + '"'):
        small, large = work(250, opening), work(1_000, opening)
        assert large < 4.5 * small + 200
    whole = filling * (2**18 // len(filling))
    family_parser = parser(family)
    told = sum(len(e.text) for e in family_parser.feed(whole) if isinstance(e, Content))
    told += sum(len(e.text) for e in family_parser.finish() if isinstance(e, Content))
    assert told == len(whole)


def test_what_is_held_back_is_not_copied_with_every_piece() -> None:
    """The cursor's own text is what `feed` copies each time: it must stay short, whatever comes."""
    for family, opening in OPENINGS.items():
        for filling in ("{", '{"a":', "<", " ", '"', "[", "x", "\\"):
            each = CallParser(TOOLS[family], NAMES, SCHEMAS)
            each.feed(opening)
            for _ in range(100):
                each.feed(filling * 20)
                assert len(each.cursor.text) - each.cursor.at < 700
