"""Calls in every family's format, however the text is cut."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.parsers.base import CallArguments, CallBroken, CallStart, Content, Event, StreamParser, assemble
from app.parsers.json_scan import MAX_DEPTH, JsonScanner
from app.parsers.registry import TOOLS

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
"""Of the arguments, for formats that write strings bare. `a` may be anything."""
Made = list[tuple[str, dict[str, Any]]]


def hermes(calls: Made) -> str:
    each = ((name, json.dumps(args, ensure_ascii=False)) for name, args in calls)
    return "\n".join(f'<tool_call>\n{{"name": "{n}", "arguments": {a}}}\n</tool_call>' for n, a in each)


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
    glm: "glm",
    glm_47: "glm",
    kimi: "kimi_k2",
}
BARE = (llama, pythonic)
"""Only an answer that begins with them has calls."""

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
        'Sure: {"name": "f", "parameters": {}}',
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
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=>\n1\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\nfree text\n</function>\n</tool_call>",
        "a <tool_call> b <function=f",
    ),
    "glm": (
        "<tool_call>nothing</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>" + "f" * 300,
        "<tool_call>f\n<arg_key>a</arg_key>\n1</tool_call>",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</tool_call>",
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
    "pythonic": (
        "[1, 2]",
        "[]",
        "[g()]",
        "[f(a=g())]",
        "[f(a=1",
        '[f(a="unended)]',
        "[f(a=01)]",
        "[f(1)]",
        "[f(a={1: 2})]",
        "[f(a=" + "[" * (MAX_DEPTH + 2),
        "see [f(a=1)]",
    ),
}


def parser(family: str) -> StreamParser:
    return TOOLS[family].parser(NAMES, SCHEMAS)


def parse(parser: StreamParser, pieces: Iterable[str]) -> list[Event]:
    events: list[Event] = []
    for piece in pieces:
        events += parser.feed(piece)
    return events + parser.finish()


def read(family: str, pieces: Iterable[str]) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls."""
    message = assemble(parse(parser(family), pieces))
    return message.content, [(call.name, call.arguments) for call in message.calls]


def cuts(text: str, seed: int = 0) -> Iterable[list[str]]:
    """The text whole, in single characters, and in random pieces."""
    yield [text]
    yield list(text)
    chance = random.Random(seed)
    for _ in range(8):
        at = sorted(chance.sample(range(len(text) + 1), min(len(text), chance.randrange(1, 12))))
        yield [text[i:j] for i, j in zip([0, *at], [*at, len(text)], strict=True)]


@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.__name__)
@pytest.mark.parametrize("around", ["", "text"])
def test_calls_are_read_however_the_text_is_cut(writer: Callable[[Made], str], around: str) -> None:
    made: Made = [("f" if i % 2 else "get_weather", args) for i, args in enumerate(ARGUMENTS)]
    for calls in ([made[0]], [made[2]], made):
        before = "Let me look. <tool" if around and writer not in BARE else ""
        after = "Done." if around else ""
        text = f"{before}\n\n{writer(calls)}\n{after}" if before else f"{writer(calls)}\n{after}"
        for pieces in cuts(text):
            content, read_calls = read(WRITERS[writer], pieces)
            assert [(name, json.loads(arguments)) for name, arguments in read_calls] == calls
            assert content == before + after


def test_python_marks_around_a_list_are_no_content() -> None:
    for pieces in cuts("Well.\n" + pythonic_tagged([("f", {"a": 'b"'})])):
        assert read("pythonic", pieces) == ("Well.", [("f", '{"a": "b\\""}')])


@pytest.mark.parametrize("family", MALFORMED)
def test_what_is_no_call_is_content_to_the_last_character(family: str) -> None:
    for text in MALFORMED[family]:
        for pieces in cuts(text):
            assert read(family, pieces) == (text, []), text
        for pieces in cuts(text + " and more"):
            content, calls = read(family, pieces)
            assert (content, calls) == (text + " and more", []) or text.endswith('"a":'), text


@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.__name__)
def test_a_cut_off_call_is_content_and_those_before_it_stay(writer: Callable[[Made], str]) -> None:
    one = writer([("f", {"a": "bcd", "e": [1]})])
    begun = one.find("f") + 1
    last = one.find("[1]") + 3 if writer is not pythonic else one.find(")")
    for end in range(begun, last):
        whole = read(WRITERS[writer], [one[:end]])
        assert whole == (one[:end].strip(), []) or whole == (one[:end], []), one[:end]
        assert read(WRITERS[writer], one[:end]) == whole
    two = writer([("f", {}), ("f", {"a": "bcd"})])
    for end in range(two.rfind("bcd"), two.rfind("bcd") + 3):
        _, calls = read(WRITERS[writer], two[:end])
        assert calls == [("f", "{}")]


def test_a_call_without_its_outer_tag_is_one_where_the_function_is_declared() -> None:
    made: Made = [("f", {"text": "x"}), ("get_weather", {})]
    for pieces in cuts(f"Hm.\n{qwen_coder_bare(made)}\nSo."):
        content, calls = read("qwen3_coder", pieces)
        assert content == "Hm.So." and [(name, json.loads(args)) for name, args in calls] == made
    assert read("qwen3_coder", ["<function=g>\n</function>"]) == ("<function=g>\n</function>", [])


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
    ({"type": "object"}, "{'a': 1}", "{'a': 1}"),
    ({"type": "array"}, "[1", "[1"),
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
    ):
        for pieces in cuts(text):
            message = assemble(parse(TOOLS[family].parser(NAMES, {"f": root}), pieces))
            assert [json.loads(call.arguments) for call in message.calls] == [{"k": value}]


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
    assert family.feed("a <tool_") == [Content("a")]
    assert family.feed("box> b") == [Content(" <tool_box> b")]
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
words = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
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
            ]
        ),
        max_size=30,
    ),
    seed=st.integers(0, 99),
)
def test_no_text_makes_a_parser_fail_or_depend_on_the_cuts(family: str, parts: list[str], seed: int) -> None:
    text = "".join(parts)
    whole = read(family, [text])
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in whole[1])
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


def lines(work: Callable[[], object]) -> int:
    """Lines of the parsers' code that run: steps, where seconds would be luck."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        code: CodeType = frame.f_code
        if "parsers" not in code.co_filename:
            return None
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
    return count


OPENINGS = {
    "hermes": '<tool_call>{"name": "f", "arguments": ',
    "llama3": '{"name": "f", "parameters": ',
    "mistral": "[TOOL_CALLS]f[ARGS]",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n",
    "pythonic": "[f(a=",
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n",
    "glm": "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>f:0<|tool_call_argument_begin|>",
}


@pytest.mark.parametrize("family", OPENINGS)
@pytest.mark.parametrize("filling", ["{", "<", '{"', "[", " ", "\n", "<tool_call>", '{"a": "', "<｜tool▁"])
def test_work_is_linear_in_the_text(family: str, filling: str) -> None:
    def work(size: int, opening: str) -> int:
        text = (opening + filling * (size // len(filling)))[:size]
        return lines(lambda: parse(parser(family), text))

    for opening in ("", OPENINGS[family], OPENINGS[family] + '{"a": "', OPENINGS[family] + '"'):
        small, large = work(1_000, opening), work(4_000, opening)
        assert large < 4.5 * small + 200
    million = filling * (2**20 // len(filling))
    family_parser = parser(family)
    told = sum(len(e.text) for e in family_parser.feed(million) if isinstance(e, Content))
    told += sum(len(e.text) for e in family_parser.finish() if isinstance(e, Content))
    assert told == len(million)


def test_what_is_held_back_is_not_copied_with_every_piece() -> None:
    """The cursor's own text is what `feed` copies each time: it must stay short, whatever comes."""
    for family, opening in OPENINGS.items():
        for filling in ("{", '{"a":', "<", " ", '"', "[", "x", "\\"):
            each = TOOLS[family].parser(NAMES, SCHEMAS)
            each.feed(opening)
            for _ in range(100):
                each.feed(filling * 20)
                assert len(each.cursor.text) - each.cursor.at < 700
