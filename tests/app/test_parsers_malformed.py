"""Texts that are no calls, half of one, or hold a broken one beside others."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.parsers.base import CallBroken, CallCut, assemble
from app.parsers.calls import CallParser
from app.parsers.json_scan import MAX_DEPTH
from app.parsers.registry import TOOLS
from tests.rigs.calls import NAMES, SCHEMAS, WRITERS, parser, read
from tests.rigs.parsers import Made, cuts, parse, splits

MALFORMED = {
    "hermes": (
        "<tool_call>nothing</tool_call>",
        "<tool_call>{'name': 'f'}</tool_call>",
        '<tool_call>{"name": "f", "arguments": {\'a\': 1}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a" 1}}</tool_call>  \n x',
        '<tool_call>{"name": "f", "arguments": {"a": "line\nbreak"}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "no object"}</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "' + "n" * 300 + '"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": ' + '{"a":' * (MAX_DEPTH + 1),
        "a <tool_call> b <tool_call",
        "<tool_call>",
    ),
    "llama3": (
        '{"foo": 1}',
        '{"name": "unknown", "parameters": {}}',
        '{"name": "f", "parameters": 5}',
        "<|python_tag|>print(1)",
        "{ not json",
        'Sure: {"name": "unknown", "parameters": {}}',
        'Sure: {"name": 5} {"type": "f"}',
        '{"tools": [{"name": "f", "parameters": {}}]}',
    ),
    "mistral": ("[TOOL_CALLS]", "[TOOL_CALLS] [5]", "[TOOL_CALLS]f[ARGS]5", "[TOOL_CALLS]f[CALL]{}"),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\nnope\n```",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>" + "f" * 400,
    ),
    "qwen3_coder": (
        "<tool_call>\nnothing\n</tool_call>",
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        "<function=unknown>\n</function>",
        "<tool_call>\n<function=f\n</tool_call>",
        "<tool_call>\n<function=" + "f" * 300 + ">",
        "<tool_call>\n<function=f>\n<parameter=>\n1\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\nfree text\n</function>\n</tool_call>",
        "a <tool_call> b <function=f",
    ),
    "glm": (
        "<tool_call>nothing</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>" + "f" * 300,
        "<tool_call>f\n<arg_key>a</arg_key>\n1</tool_call>",
        "<tool_call>f\n<arg_key></arg_key>\n<arg_value>1</arg_value></tool_call>",
        "<tool_call>f\nfree text</tool_call>",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_begin|>f",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0{}<|tool_call_end|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>f:0<|tool_call_argument_begin|>5<|tool_call_end|>",
    ),
    "functiongemma": (
        "<start_function_call>",
        "<start_function_call>f{a:1}<end_function_call>",
        "<start_function_call>call:{a:1}<end_function_call>",
        "<start_function_call>call:" + "f" * 300,
        "<start_function_call>call:f(a:1)<end_function_call>",
        "<start_function_call>call:f{a}<end_function_call>",
        "<start_function_call>call:f{:1}<end_function_call>",
        "<start_function_call>call:f{a:}<end_function_call>",
        "<start_function_call>call:f{a:{b:[}}<end_function_call>",
        "<start_function_call>call:f{a:1 {}}<end_function_call>",
        "<start_function_call>call:f{a:" + "[" * (MAX_DEPTH + 2),
    ),
    "granite": (
        "<|tool_call|>",
        "<|tool_call|>[]",
        '<|tool_call|> {"name": "f", "arguments": {}}',
        '<|tool_call|>[{"name": "f", "arguments": "not a dict"}]',
        '[{"name": "f", "arguments": {}}]',
        'Some text [{"name": "f"}] and <tool_call> alone',
    ),
    "phi4_mini_json": (
        "functools",
        "functools[",
        "import functools\nfunctools.partial(f)",
        "functools[nothing]",
        'functools{"name": "f", "arguments": {}}',
        'functools[{"name": "f", "arguments": [1]}]',
    ),
    "olmo3": (
        "<function_calls>",
        "<function_calls></function_calls>",
        "<function_calls>f</function_calls>",
        "<function_calls>f(1)</function_calls>",
        "<function_calls>f(a=g())</function_calls>",
        '<function_calls>{"name": "f"}</function_calls>',
        "f(a=1)",
    ),
    "minimax_m2": (
        "<minimax:tool_call>",
        "<minimax:tool_call>\nnothing\n</minimax:tool_call>",
        '<minimax:tool_call>\n<invoke name="">\n</invoke>\n</minimax:tool_call>',
        '<minimax:tool_call>\n<invoke name="f">\nfree text\n</invoke>\n</minimax:tool_call>',
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="">1</parameter>\n</invoke>',
        '<invoke name="unknown">\n</invoke>',
        "a <minimax:tool_call> b <invoke",
    ),
    "deepseek_v32": (
        "<｜DSML｜function_calls>",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n{"a" 1}\n</｜DSML｜invoke>',
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\nno\n</｜DSML｜invoke>',
        '<｜DSML｜invoke name="unknown">\n</｜DSML｜invoke>',
    ),
    "pythonic": (
        "[1, 2]",
        "[]",
        "[g()]",
        "[f(a=g())]",
        "[f(a=01)]",
        "[f(1)]",
        "[f(a={1: 2})]",
        "[f(a=" + "[" * (MAX_DEPTH + 2),
        "see [f(1)], [g(a=1)] or [f(x) for x in y]",
        "[1, [f(a=1)]]",
    ),
}


@pytest.mark.parametrize("family", MALFORMED)
def test_what_is_no_call_is_content_to_the_last_character(family: str) -> None:
    for text in MALFORMED[family]:
        for pieces in cuts(text):
            assert read(family, pieces) == (text, []), text
        for pieces in cuts(text + " and more"):
            content, calls = read(family, pieces)
            assert (content, calls) == (text + " and more", []) or text.endswith('"a":'), text


@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.__name__)
def test_a_cut_off_call_stays_one_once_it_was_told(writer: Callable[[Made], str]) -> None:
    one = writer([("f", {"text": "bcd", "deep": [1]})])
    whole = writer([("f", {"text": "bcd"})])
    for end in range(len(one)):
        content, calls = read(WRITERS[writer], [one[:end]])
        assert read(WRITERS[writer], one[:end]) == (content, calls), one[:end]
        if calls:
            [(name, arguments)] = calls
            assert name == "f" and not content, one[:end]
            assert '{"text": "bcd", "deep": [1]}'.startswith(arguments), (one[:end], arguments)
        else:
            assert content in (one[:end], one[:end].strip())
    assert any(read(WRITERS[writer], whole[:end])[1] for end in range(whole.find("bcd") + 3))
    two = writer([("f", {}), ("f", {"text": "bcd"})])
    for end in range(two.rfind("bcd"), two.rfind("bcd") + 3):
        _, calls = read(WRITERS[writer], two[:end])
        assert calls[0] == ("f", "{}")


@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.__name__)
def test_a_forced_call_is_one_wherever_it_is_cut(writer: Callable[[Made], str]) -> None:
    """No mark is ever told as text, however the rest comes."""
    made: Made = [("f", {"text": "bcd", "deep": [1]}), ("get_weather", {})]
    for calls, names in ((made[:1], frozenset({"f"})), (made, NAMES)):
        text = writer(calls)
        for end in range(1, len(text) + 1):
            told = set()
            for pieces in ([text[:end]], text[:end]):
                each = CallParser(TOOLS[WRITERS[writer]], names, SCHEMAS, True)
                message = assemble(parse(each, pieces))
                assert message.content == "", text[:end]
                assert [call.name for call in message.calls] == ["f", "get_weather"][: len(message.calls)]
                assert message.calls or len(names) > 1, text[:end]
                if message.calls:
                    assert '{"text": "bcd", "deep": [1]}'.startswith(message.calls[0].arguments)
                told.add(str([(call.name, call.arguments) for call in message.calls]))
            assert len(told) == 1


@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.__name__)
def test_half_an_end_is_no_content(writer: Callable[[Made], str]) -> None:
    text = writer([("f", {"text": "bcd", "deep": [1]})])
    for end in range(text.rfind("[1]") + 4, len(text) + 1):
        for pieces in (*cuts("Hm." + text[:end]), *splits("Hm." + text[:end])):
            assert read(WRITERS[writer], pieces)[0] == "Hm.", text[:end]


GOOD = ("g", '{"a": 1}')


AMONG = {
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        '<|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>',
        "<|tool_calls_section_end|>",
        (
            "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{'a': 1}<|tool_call_end|>",
            '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": "b}<|tool_call_end|>',
            '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1, b}<|tool_call_end|>',
            '<|tool_call_begin|>functions.f:0{"a": 1}<|tool_call_end|>',
            "<|tool_call_begin|>",
        ),
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>",
        '<｜tool▁call▁begin｜>g<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>',
        "<｜tool▁calls▁end｜>",
        (
            "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{'a': 1}<｜tool▁call▁end｜>",
            '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "b}<｜tool▁call▁end｜>',
            '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1, b}\n```<｜tool▁call▁end｜>',
            '<｜tool▁call▁begin｜>f{"a": 1}<｜tool▁call▁end｜>',
        ),
    ),
    "hermes": (
        "",
        '<tool_call>{"name": "g", "arguments": {"a": 1}}</tool_call>',
        "",
        (
            '<tool_call>{"name": "f", "arguments": {"a": "b}}</tool_call>',
            '<tool_call>{"name": "f", "arguments": {\'a\': 1}}</tool_call>',
        ),
    ),
}


@pytest.mark.parametrize("family", AMONG)
def test_a_malformed_call_does_not_take_others_along(family: str) -> None:
    opening, good, closing, wrong = AMONG[family]
    for bad in wrong:
        for text in (opening + bad + good + good + closing, opening + good + bad + good + closing):
            for pieces in (*cuts(text), *splits(text)):
                content, calls = read(family, pieces)
                assert calls == [GOOD, GOOD], text
                assert content in (bad, opening + bad), text


def test_an_argument_that_never_ends_does_not_swallow_the_next() -> None:
    for text in (
        "<tool_call>\n<function=f>\n<parameter=text>\nx\n<parameter=json>\ny\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=text>x<parameter=json>y</parameter></function></tool_call>",
        "<tool_call>\n<function=f>\n<parameter=text>\nx\n</parameter>\n<parameter=json>\ny\n</function>\n</tool_call>",
    ):
        both = [("f", '{"text": "x", "json": "y"}')]
        for pieces in (*cuts(text), *splits(text)):
            assert read("qwen3_coder", pieces) == ("", both), text
        for pieces in (*cuts(text + text), *splits(text + text)):
            assert read("qwen3_coder", pieces) == ("", both * 2), text
    unknown = text.replace("text>\nx\n</parameter>", "text>\nx <parameter=other>\n</parameter>")
    assert read("qwen3_coder", [unknown])[1][0][1] == '{"text": "x <parameter=other>", "json": "y"}'
    bare = CallParser(TOOLS["qwen3_coder"], NAMES)
    text = "<function=f>\n<parameter=a>\nx\n<parameter=b>\n2\n</parameter>\n</function>"
    assert [call.arguments for call in assemble(parse(bare, text)).calls] == ['{"a": "x", "b": 2}']


def test_a_call_that_breaks_after_it_began_loses_nothing() -> None:
    text = 'x <tool_call>{"name": "f", "arguments": {"a": 1, b}}</tool_call>'
    events = parse(parser("hermes"), text)
    message = assemble(events)
    assert message.content == text and message.calls == []
    told = "".join(e.rest if isinstance(e, CallBroken) else getattr(e, "text", "") for e in events)
    wanted = text.replace('<tool_call>{"name": "f", "arguments": ', "")
    assert "".join(told.split()) == "".join(wanted.split())
    events = parse(parser("pythonic"), "[f(a=1, b=c)] x")
    told = "".join(e.rest if isinstance(e, CallBroken) else getattr(e, "text", "") for e in events)
    assert told == '{"a": 1, "b": ' + "c)] x"


def test_forgiving_where_models_are_sloppy() -> None:
    for text, arguments in (
        ('<tool_call>{"name":"f"}</tool_call>', "{}"),
        ('<tool_call>{"name":"f","arguments":null}</tool_call>', "{}"),
        ('<tool_call>{"name":"f","arguments":""}</tool_call>', "{}"),
        ('<tool_call>{"arguments":{"a": 1},"name":"f"}</tool_call>', '{"a": 1}'),
        ('<tool_call>{"id":[1],"name":"f","parameters":{}}</tool_call>', "{}"),
        ('<tool_call>{"name":"f","arguments":"{\\"a\\": 1}"}</tool_call>', '{"a": 1}'),
        ('<tool_call>{"name":"f","arguments":{"a": 1}', '{"a": 1}'),
        ('<tool_call>{"name":"f","arguments":{"a": 1}</tool_call>', '{"a": 1}'),
        ('<tool_call>{"name":"f","arguments":{"a": 1},"extra":2}</tool_call>', '{"a": 1}'),
    ):
        for pieces in cuts(text):
            assert read("hermes", pieces) == ("", [("f", arguments)]), text


@settings(max_examples=300, deadline=None)
@given(
    family=st.sampled_from(sorted(TOOLS)),
    parts=st.lists(
        st.sampled_from(
            [
                *"{}[]()<>:,;\"'\\ \n=ax1",
                *('"name"', '"arguments": {', '{"name": "f", ', "<tool_call>", "</tool_call>", "f("),
                *("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<｜tool▁calls▁begin｜>"),
                *("<｜tool▁call▁begin｜>", "function<｜tool▁sep｜>", "```json", "<｜tool▁call▁end｜>"),
                *("<start_function_call>", "call:f{", "a:", "<escape>", "<end_function_call>"),
                *(
                    "<|tool_call|>",
                    "functools[",
                    "<function_calls>",
                    "</function_calls>",
                    '<invoke name="f">',
                ),
            ]
        ),
        max_size=30,
    ),
    seed=st.integers(0, 99),
)
@example(family="mistral", parts=["[TOOL_CALLS]", "f", '{"name": "f", '], seed=0)
def test_no_text_makes_a_parser_fail_or_depend_on_the_cuts(family: str, parts: list[str], seed: int) -> None:
    text = "".join(parts)
    whole = read(family, [text])
    cut = any(isinstance(event, CallCut) for event in parse(parser(family), [text]))
    complete = whole[1][:-1] if cut else whole[1]
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in complete)
    assert whole[1] or whole[0] == text
    for pieces in cuts(text, seed) if text else ():
        assert read(family, pieces) == whole
