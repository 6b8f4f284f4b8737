"""Calls in every family's format, however the text is cut."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.parsers import fields
from app.parsers.base import CallArguments, CallBroken, CallCut, CallStart, Content, assemble
from app.parsers.calls import CallParser
from app.parsers.json_scan import MAX_DEPTH, JsonScanner
from app.parsers.registry import TOOLS
from app.parsers.typed import members, types_of
from tests.rigs.parsers import Made, cuts, hermes, lines, parse, splits

NAMES = frozenset({"f", "get_weather"})

ARGUMENTS = (
    {},
    {"a": 1},
    {"text": 'a "quoted" \\ line\nand\ttab', "nested": {"list": [1, -2.5e-3, True, False, None, "x"]}},
    {"é": "日本語 😀 \u2028", "tags": "</tool_call> <tool_call> ``` [TOOL_CALLS] [ARGS] ); } ] ' \" "},
    {"json": '{"name": "f", "arguments": {}}', "empty": "", "deep": [[[[{"a": {"b": []}}]]]]},
)
TYPES = {key: {"type": "string"} for key in ("text", "é", "tags", "json", "empty")}
SCHEMAS = {
    name: {"properties": TYPES | {"nested": {"type": "object"}, "deep": {"type": "array"}}} for name in NAMES
}
"""Schemas of the arguments, for formats that write strings bare. `a` may be anything."""


def llama(calls: Made) -> str:
    return "; ".join(f'{{"name": "{name}", "parameters": {json.dumps(args)}}}' for name, args in calls)


def llama_tagged(calls: Made) -> str:
    return "<|python_tag|>" + llama(calls)


def mistral(calls: Made) -> str:
    return "[TOOL_CALLS] " + json.dumps([{"name": name, "arguments": args} for name, args in calls])


def mistral_11(calls: Made) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(args)}" for name, args in calls)


def mistral_13(calls: Made) -> str:
    return "".join(f"[TOOL_CALLS]{name}[CALL_ID]a1b2c3d4e[ARGS]{json.dumps(args)}" for name, args in calls)


def deepseek(calls: Made) -> str:
    each = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(args)}\n```<｜tool▁call▁end｜>"
        for name, args in calls
    )
    return "<｜tool▁calls▁begin｜>" + "\n".join(each) + "<｜tool▁calls▁end｜>"


def deepseek_31(calls: Made) -> str:
    each = (
        f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{json.dumps(args)}<｜tool▁call▁end｜>" for n, args in calls
    )
    return "<｜tool▁calls▁begin｜>" + "".join(each) + "<｜tool▁calls▁end｜>"


def pythonic(calls: Made) -> str:
    each = (f"{name}({', '.join(f'{key}={value!r}' for key, value in args.items())})" for name, args in calls)
    return f"[{', '.join(each)}]"


def pythonic_tagged(calls: Made) -> str:
    return f"<|python_start|>{pythonic(calls)}<|python_end|>"


def tagged(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def qwen_coder(calls: Made) -> str:
    each = (
        (name, "".join(f"<parameter={key}>\n{tagged(value)}\n</parameter>\n" for key, value in args.items()))
        for name, args in calls
    )
    return "\n".join(f"<tool_call>\n<function={name}>\n{a}</function>\n</tool_call>" for name, a in each)


def qwen_coder_bare(calls: Made) -> str:
    return qwen_coder(calls).replace("<tool_call>\n<function", "<function").replace("\n</tool_call>", "")


def glm(calls: Made) -> str:
    each = (
        (
            name,
            "".join(
                f"<arg_key>{key}</arg_key>\n<arg_value>{tagged(value)}</arg_value>\n"
                for key, value in args.items()
            ),
        )
        for name, args in calls
    )
    return "\n".join(f"<tool_call>{name}\n{a}</tool_call>" for name, a in each)


def glm_47(calls: Made) -> str:
    lines = ("</arg_key>\n<arg_value>", "</arg_value>\n<", "\n<arg_key>", "\n</tool_call>")
    text = glm(calls)
    for line in lines:
        text = text.replace(line, line.replace("\n", ""))
    return text


def kimi(calls: Made) -> str:
    each = (
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{json.dumps(a)}<|tool_call_end|>"
        for i, (name, a) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(each)}<|tool_calls_section_end|>"


def gemma_value(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, list):
        return f"[{','.join(gemma_value(each, quote) for each in value)}]"
    if isinstance(value, dict):
        keys = {key: key if key.isidentifier() else json.dumps(key) for key in value}
        return f"{{{','.join(f'{keys[key]}:{gemma_value(each, quote)}' for key, each in value.items())}}}"
    return json.dumps(value)


def function_gemma(calls: Made) -> str:
    each = (f"call:{name}{gemma_value(args, '<escape>')}" for name, args in calls)
    return "".join(f"<start_function_call>{one}<end_function_call>" for one in each)


def gemma_4(calls: Made) -> str:
    marks = ("<start_function_call>", "<|tool_call>"), ("<end_function_call>", "<tool_call|>")
    text = function_gemma(calls)
    for theirs, ours in (*marks, ("<escape>", '<|"|>')):
        text = text.replace(theirs, ours)
    return text


def listed(calls: Made) -> str:
    return json.dumps([{"name": name, "arguments": args} for name, args in calls], ensure_ascii=False)


def granite(calls: Made) -> str:
    return f"<|tool_call|>{listed(calls)}"


def granite_31(calls: Made) -> str:
    return f"<tool_call> {listed(calls)}"


def granite_20b(calls: Made) -> str:
    return " ".join(f"<function_call> {listed([call])[1:-1]}" for call in calls)


def phi(calls: Made) -> str:
    return f"functools{listed(calls)}"


def phi_tokens(calls: Made) -> str:
    return "".join(f"<|tool_call|>{listed([call])[1:-1]}<|/tool_call|>" for call in calls)


def olmo(calls: Made) -> str:
    lines = (pythonic([call])[1:-1] for call in calls)
    return "<function_calls>\n{}\n</function_calls>".format("\n".join(lines))


def invoked(calls: Made, mark: str, outer: str, argument: Callable[[str, Any], str]) -> str:
    each = ((name, "".join(argument(key, value) for key, value in args.items())) for name, args in calls)
    inner = "".join(f'<{mark}invoke name="{name}">\n{made}</{mark}invoke>\n' for name, made in each)
    return f"<{outer}>\n{inner}</{outer}>"


def minimax(calls: Made) -> str:
    def argument(key: str, value: Any) -> str:
        return f'<parameter name="{key}">{tagged(value)}</parameter>\n'

    return invoked(calls, "", "minimax:tool_call", argument)


def dsml(calls: Made) -> str:
    def argument(key: str, value: Any) -> str:
        string = "true" if isinstance(value, str) else "false"
        return f'<｜DSML｜parameter name="{key}" string="{string}">{tagged(value)}</｜DSML｜parameter>\n'

    return invoked(calls, "｜DSML｜", "｜DSML｜function_calls", argument)


def dsml_4(calls: Made) -> str:
    return dsml(calls).replace("function_calls>", "tool_calls>")


def dsml_plain(calls: Made) -> str:
    return dsml(calls).replace("｜DSML｜", "")


def seed(calls: Made) -> str:
    def written(name: str, args: dict[str, Any]) -> str:
        inner = "".join(f"<parameter={key}>{tagged(value)}</parameter>\n" for key, value in args.items())
        return f"<seed:tool_call>\n<function={name}>\n{inner}</function>\n</seed:tool_call>"

    return "\n".join(written(name, args) for name, args in calls)


WRITERS: dict[Callable[[Made], str], str] = {
    hermes: "hermes",
    llama: "llama3",
    llama_tagged: "llama3",
    mistral: "mistral",
    mistral_11: "mistral",
    mistral_13: "mistral",
    deepseek: "deepseek_v3",
    deepseek_31: "deepseek_v3",
    pythonic: "pythonic",
    qwen_coder: "qwen3_coder",
    seed: "seed_oss",
    glm: "glm",
    glm_47: "glm",
    kimi: "kimi_k2",
    function_gemma: "functiongemma",
    gemma_4: "gemma4",
    granite: "granite",
    granite_31: "granite",
    granite_20b: "granite-20b-fc",
    phi: "phi4_mini_json",
    phi_tokens: "phi4_mini_json",
    olmo: "olmo3",
    minimax: "minimax_m2",
    dsml: "deepseek_v32",
    dsml_4: "deepseek_v4",
    dsml_plain: "deepseek_v32",
}
LEADS = {"hermes": "\n", "qwen3_coder": "\n\n", "glm": "\n", "minimax_m2": "\n"}
LEADS |= dict.fromkeys(("deepseek_v32", "deepseek_v4", "seed_oss"), "\n\n")
"""Text that templates write between an answer's text and its calls."""

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


def parser(family: str) -> CallParser:
    return CallParser(TOOLS[family], NAMES, SCHEMAS)


def read(family: str, pieces: Iterable[str]) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls."""
    message = assemble(parse(parser(family), pieces))
    return message.content, [(call.name, call.arguments) for call in message.calls]


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


def test_strings_of_gemma_may_be_as_in_json_or_bare() -> None:
    text = '<|tool_call>call:f{ text: New York, a: [1, "b\\n", {"c": <|"|>d}<|"|>, e:x}] }<tool_call|>'
    for pieces in cuts(text):
        content, [(name, arguments)] = read("gemma4", pieces)
        assert (content, name) == ("", "f")
        assert json.loads(arguments) == {"text": "New York", "a": [1, "b\n", {"c": "d}", "e": "x"}]}


def test_python_marks_around_a_list_are_no_content() -> None:
    for pieces in cuts("Well.\n" + pythonic_tagged([("f", {"a": 'b"'})])):
        assert read("pythonic", pieces) == ("Well.\n", [("f", '{"a": "b\\""}')])


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


def test_a_mark_in_a_string_is_no_call() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "<tool_call>{}</tool_call>"}}</tool_call>'
    assert read("hermes", [text]) == ("", [("f", '{"a": "<tool_call>{}</tool_call>"}')])


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


def test_members_of_half_an_object() -> None:
    text = '{"a": 1, "b": {"c": [true, "x"]}, "d": "\\u00e9\\"", "e": 12'
    whole = {"a": 1, "b": {"c": [True, "x"]}, "d": 'é"'}
    for end in range(len(text) + 1):
        found = members(text[:end])
        assert all(whole[key] == value for key, value in found.items()), text[:end]
    assert found == whole and members(text + "}") == whole | {"e": 12}
    assert members("") == members("{") == members("[1]") == {}


def test_a_call_without_its_outer_tag_is_one_where_the_function_is_declared() -> None:
    made: Made = [("f", {"text": "x"}), ("get_weather", {})]
    for pieces in cuts(f"Hm.\n{qwen_coder_bare(made)}\nSo."):
        content, calls = read("qwen3_coder", pieces)
        assert content == "Hm.\nSo." and [(name, json.loads(args)) for name, args in calls] == made
    assert read("qwen3_coder", ["<function=g>\n</function>"]) == ("<function=g>\n</function>", [])


def test_olmos_values_are_pythons_or_json() -> None:
    text = (
        "<function_calls>f(a=null, b=[true, None], c={}, d='it\\'s', e={\"k\": 'v'}, f=-1.5)</function_calls>"
    )
    for pieces in cuts(text):
        _, [(_, arguments)] = read("olmo3", pieces)
        values = {"a": None, "b": [True, None], "c": {}, "d": "it's", "e": {"k": "v"}, "f": -1.5}
        assert json.loads(arguments) == values


@pytest.mark.parametrize(
    ("said", "written", "value"),
    [("true", "5", "5"), ("true", " <a>\n", " <a>\n"), ("false", "5", 5), ("false", "[1, {}]", [1, {}])],
)
def test_deepseeks_tags_say_whether_a_value_is_a_string(said: str, written: str, value: Any) -> None:
    """Whatever the schema: `text` is a string, of `a` nothing is known."""
    for key in ("a", "text"):
        argument = f'<｜DSML｜parameter name="{key}" string="{said}">{written}</｜DSML｜parameter>'
        for pieces in cuts(f'<｜DSML｜invoke name="f">{argument}</｜DSML｜invoke>'):
            assert [json.loads(made) for _, made in read("deepseek_v32", pieces)[1]] == [{key: value}]


def test_deepseeks_arguments_may_be_one_object() -> None:
    one = '<｜DSML｜invoke name="f">\n{"a": [1]}\n</｜DSML｜invoke>\n'
    for text in (f"<｜DSML｜function_calls>\n{one * 2}</｜DSML｜function_calls>", one * 2):
        for pieces in (*cuts(text), *splits(text)):
            assert read("deepseek_v32", pieces) == ("", [("f", '{"a": [1]}')] * 2)


TYPED: list[tuple[Any, str, Any]] = [
    ({"type": "string"}, "5", "5"),
    ({"type": "string"}, "null", "null"),
    ({"type": "string"}, ' "q" \n\n', ' "q" \n\n'),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"type": "integer"}, " 5\n", 5),
    ({"type": "integer"}, "five", "five"),
    ({"type": "number"}, "-1.5e3", -1500.0),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "false", False),
    ({"type": ["string", "null"]}, "None", None),
    ({"type": ["string", "null"]}, '"x"', '"x"'),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
    ({"type": "object"}, '{"a": [1,\n 2]}', {"a": [1, 2]}),
    ({"type": "object"}, "{'a': 1}", {"a": 1}),
    ({"type": "object"}, "{'a': [True, None, 'x\"y'], \"b\": -1.5}\n", {"a": [True, None, 'x"y'], "b": -1.5}),
    ({"type": "object"}, "{'a': f()}", "{'a': f()}"),
    ({"type": "object"}, "['a']", "['a']"),
    ({"type": "array"}, "['a', 1]", ["a", 1]),
    ({"type": ["string", "object"]}, "{'a': 1}", {"a": 1}),
    ({"type": "string"}, "{'a': 1}", "{'a': 1}"),
    ({}, "{'a': 1}", "{'a': 1}"),
    ({"type": "float"}, "5", 5),
    ({"type": "double"}, "-0.5", -0.5),
    ({"type": "int"}, "5", 5),
    ({"type": "bool"}, "True", True),
    ({"type": "str"}, "5", "5"),
    ({"type": "dict"}, "{'a': {}}", {"a": {}}),
    ({"type": "list[str]"}, "['5']", ["5"]),
    ({"type": "FLOAT"}, "1e3", 1000.0),
    ({"type": "of tomorrow"}, "5", 5),
    ({"type": "array"}, "[1", "[1"),
    ({"const": 1, "enum": None}, "1", 1),
    ({"enum": [None, "x"]}, "null", None),
    ({"$ref": "#/$defs/S"}, "7", "7"),
    ({"$ref": "#/$defs/none"}, "7", 7),
    ({"$ref": "#"}, "[]", []),
    ({}, '"x"', "x"),
    ({}, "x y", "x y"),
    (True, "01", "01"),
]


@pytest.mark.parametrize(("schema", "written", "value"), TYPED)
def test_a_bare_value_is_what_its_schema_says(schema: Any, written: str, value: Any) -> None:
    root = {"properties": {"k": schema}, "$defs": {"S": {"type": "string"}}}
    for family, text in (
        ("qwen3_coder", f"<tool_call>\n<function=f>\n<parameter=k>\n{written}\n</parameter>\n</function>"),
        ("glm", f"<tool_call>f\n<arg_key>k</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>"),
        ("minimax_m2", f'<invoke name="f">\n<parameter name="k">{written}</parameter>\n</invoke>'),
    ):
        for pieces in cuts(text):
            message = assemble(parse(CallParser(TOOLS[family], NAMES, {"f": root}), pieces))
            assert [json.loads(call.arguments) for call in message.calls] == [{"k": value}]


@pytest.mark.parametrize("family", ["qwen3_coder", "glm", "minimax_m2"])
def test_a_const_beside_an_unset_enum_holds(family: str) -> None:
    written = TOOLS[family].writing.fields
    assert written is not None
    of_const, of_enum = (
        fields.arguments({"properties": {"k": {"type": "string", **listed}}}, written, True, False)
        for listed in ({"const": "x", "enum": None}, {"enum": ["x"]})
    )
    assert of_const == of_enum and "any_text" not in str(of_const)


def test_bare_strings_are_told_as_they_come() -> None:
    family = parser("qwen3_coder")
    family.feed("<tool_call>\n<function=f>\n<parameter=text>\n")
    assert [event.text for event in family.feed('a "b" </para')] == ['a \\"b\\" ']
    assert [event.text for event in family.feed("x\n")] == ["</parax"]
    assert [event.text for event in family.feed("\n</parameter>")] == ["\\n", '"']


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


def test_schemas_that_branch_into_each_other_are_followed_no_further_than_a_bound() -> None:
    for key in ("anyOf", "allOf"):
        schema = {key: [{"$ref": "#/$defs/x"}] * 60}
        root = {"properties": {"k": schema}, "$defs": {"x": schema}}
        assert lines(partial(types_of, schema, root)) < 10_000
        assert types_of(schema, root) is None


def test_many_arguments_of_a_function_do_not_make_each_slow() -> None:
    text = "<tool_call>\n<function=f>\n<parameter=k1>\n1\n<parameter=k2>\n2\n</parameter>\n</function>"
    for count, arguments in ((10, {"k1": "1", "k2": "2"}), (5_000, {"k1": "1", "k2": "2"})):
        schema = {"properties": {f"k{i}": {"type": "string"} for i in range(count)}}
        for pieces in cuts(text):
            message = assemble(parse(CallParser(TOOLS["qwen3_coder"], NAMES, {"f": schema}), pieces))
            assert [json.loads(call.arguments) for call in message.calls] == [arguments]


def test_what_is_held_back_is_not_copied_with_every_piece() -> None:
    """The cursor's own text is what `feed` copies each time: it must stay short, whatever comes."""
    for family, opening in OPENINGS.items():
        for filling in ("{", '{"a":', "<", " ", '"', "[", "x", "\\"):
            each = CallParser(TOOLS[family], NAMES, SCHEMAS)
            each.feed(opening)
            for _ in range(100):
                each.feed(filling * 20)
                assert len(each.cursor.text) - each.cursor.at < 700
