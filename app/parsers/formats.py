"""How model families write their calls as JSON."""

from __future__ import annotations

import json

from app.parsers.calls import CallParser, Format
from app.parsers.cursor import Malformed, Steps, checked_name
from app.parsers.typed import encodable, is_json

HERMES = ("<tool_call>", "</tool_call>")
MISTRAL = "[TOOL_CALLS]"
GRANITE = ("<|tool_call|>", "<tool_call>")
"""Granite 3.0, 3.2 and 3.3 write the token, 3.1 the text."""
GRANITE_20B = "<function_call>"
PHI = ("functools[", "<|tool_call|>", "<|/tool_call|>")
"""The first with its bracket, since the word alone is one of Python's modules. The others are tokens."""
LLAMA = "<|python_tag|>"
LLAMA_BEGINS = tuple(
    f'{{{gap}"{key}"' for key in ("name", "type") for gap in ("", " ", "\n", "\n  ", "\n    ", "\n\t")
)
"""Beginnings of a call's JSON object that models write without the tag."""
DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
KIMI = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")

_ARGUMENTS = frozenset({'"arguments"', '"parameters"'})
"""Keys of a call's arguments, as they stand in the text."""
_FENCE = "```"


def hermes(calls: CallParser) -> Steps[None]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`"""
    cursor = calls.cursor
    yield from cursor.expect(HERMES[0])
    yield from call(calls)
    yield from calls.tail(HERMES[1])


def llama(calls: CallParser) -> Steps[None]:
    """`<|python_tag|>{"name": ..., "parameters": {...}}; {...}`; functions must be declared without it."""
    declared = not (yield from calls.cursor.skip(LLAMA))
    yield from call(calls, declared)
    while (yield from calls.gap()) == ";":
        calls.cursor.record()
        calls.cursor.take(calls.cursor.at + 1)
        yield from call(calls, declared)


def mistral(calls: CallParser) -> Steps[None]:
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, or from version 11 on
    `[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}` for each. Models omit the list, too."""
    cursor = calls.cursor
    yield from cursor.expect(MISTRAL)
    sign = yield from cursor.spaces()
    if sign == "{":
        yield from call(calls)
        while (yield from calls.gap()) == "{":
            cursor.record()
            yield from call(calls)
        return
    if sign != "[":
        yield from _named(calls)
        return
    yield from listed(calls)


def granite(calls: CallParser) -> Steps[None]:
    """`<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`; either mark is read of every version."""
    if not (yield from calls.cursor.skip(GRANITE[0])):
        yield from calls.cursor.expect(GRANITE[1])
    yield from listed(calls)


def phi(calls: CallParser) -> Steps[None]:
    """`functools[{"name": ..., "arguments": {...}}, ...]`, or a list or one call between the tokens."""
    cursor = calls.cursor
    if (yield from cursor.skip(PHI[0][:-1])):
        yield from listed(calls)
        return
    yield from cursor.expect(PHI[1])
    yield from (call(calls) if (yield from cursor.spaces()) == "{" else listed(calls))
    yield from calls.tail(PHI[2])


def listed(calls: CallParser) -> Steps[None]:
    """`[{"name": ..., "arguments": {...}}, ...]`"""
    cursor = calls.cursor
    yield from cursor.spaces()
    yield from cursor.expect("[")
    yield from call(calls)
    while (yield from calls.gap()) == ",":
        cursor.take(cursor.at + 1)
        cursor.record()
        yield from call(calls)
    yield from calls.tail("]")


def deepseek(calls: CallParser) -> Steps[None]:
    """Between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>`: V3 writes `function`, a separator, the
    name and a fence of JSON; V3.1 the name, the separator and plain JSON."""
    cursor = calls.cursor
    yield from cursor.skip(DEEPSEEK[0])
    yield from cursor.spaces()
    yield from cursor.expect(DEEPSEEK[1])
    name = yield from cursor.until("<｜tool▁sep｜>")
    if name == "function":
        name = yield from cursor.until("\n")
        yield from cursor.skip(_FENCE + "json")
    yield from arguments(calls, name)
    for end in (_FENCE, "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"):
        yield from calls.tail(end)


def kimi(calls: CallParser) -> Steps[None]:
    """Between `<|tool_call_begin|>` and `<|tool_call_end|>`: an id, `functions.name:0`, a mark and JSON."""
    cursor = calls.cursor
    yield from cursor.skip(KIMI[0])
    yield from cursor.spaces()
    yield from cursor.expect(KIMI[1])
    id = (yield from cursor.until("<|tool_call_argument_begin|>")).strip()
    yield from arguments(calls, id.removeprefix("functions.").partition(":")[0], checked_name(id))
    yield from calls.tail("<|tool_call_end|>")
    yield from calls.tail("<|tool_calls_section_end|>")


def _named(calls: CallParser) -> Steps[None]:
    cursor = calls.cursor
    name = yield from cursor.run(lambda sign: sign not in "[{")
    sign = yield from cursor.peek()
    if sign == "":
        raise Malformed
    if sign == "[":
        if (yield from cursor.skip("[CALL_ID]")):
            yield from cursor.until("[ARGS]")
        else:
            yield from cursor.expect("[ARGS]")
    yield from arguments(calls, name)


def call(calls: CallParser, declared: bool = False) -> Steps[None]:
    """`{"name": ..., "arguments": {...}}`, the keys in any order, other keys ignored."""
    cursor = calls.cursor
    name, early = "", "{}"
    yield from cursor.spaces()
    yield from cursor.expect("{")
    reported = False
    while (yield from cursor.spaces()) == '"':
        key = yield from _value(calls)
        yield from cursor.spaces()
        yield from cursor.expect(":")
        if key == '"name"' and not name:
            name = calls.named(_text(json.loads((yield from _value(calls)))), declared)
        elif key in _ARGUMENTS and name and not reported:
            reported = True
            yield from arguments(calls, name)
        else:
            value = yield from _value(calls)
            early = _object(value) if key in _ARGUMENTS and not reported else early
        if (yield from cursor.spaces()) != ",":
            break
        cursor.take(cursor.at + 1)
    if reported:
        yield from cursor.skip("}")
        return
    yield from cursor.expect("}")
    calls.start(calls.named(name))
    calls.arguments(early)
    calls.whole()


def arguments(calls: CallParser, name: str, id: str = "") -> Steps[None]:
    """A call's arguments, reported as they come."""
    name = calls.named(name)
    head, signs = "", 0

    def take(span: str) -> None:
        """Report the call once its arguments begin like an object, `{"` or `{}`: what most often goes
        wrong (`{'a': 1}`, `{a: 1}`) is seen before anything was reported."""
        nonlocal head, signs
        if signs >= 2:
            calls.arguments(span)
            return
        head += span
        signs += sum(map(len, span.split()))
        if signs >= 2:
            calls.start(name, id)
            calls.arguments(head)

    if (yield from calls.cursor.spaces()) == "{":
        yield from calls.cursor.value(take)
    else:
        text = _object((yield from _value(calls)))
        calls.start(name, id)
        calls.arguments(text)
    calls.whole()


def _value(calls: CallParser) -> Steps[str]:
    """One JSON value as it is written, without the space around it."""
    parts: list[str] = []
    yield from calls.cursor.value(parts.append)
    return "".join(parts).strip()


def _text(value: object) -> str:
    """A decoded string that can be encoded again. Raises `Malformed`."""
    if not isinstance(value, str) or not encodable(value):
        raise Malformed
    return value


def _object(value: str) -> str:
    """Arguments as an object's text, also from null or a string that holds one, as some models write them.
    Raises `Malformed`."""
    if value.startswith("{"):
        return value
    if value == "null":
        return "{}"
    inner = _text(json.loads(value)).strip() or "{}"
    if not inner.startswith("{") or not is_json(inner):
        raise Malformed
    return inner


def marked(marker: str, calls: Format) -> Format:
    """`calls` behind a marker."""

    def behind(parser: CallParser) -> Steps[None]:
        yield from parser.cursor.expect(marker)
        yield from calls(parser)

    return behind
