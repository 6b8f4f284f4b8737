"""Calls whose arguments are written one by one between tags, as JSON while they come."""

from __future__ import annotations

from collections.abc import Callable

from app.parsers.calls import CallParser
from app.parsers.cursor import Cursor, Malformed, Steps, checked_name
from app.parsers.pythonic import json_argument
from app.parsers.typed import Types, inside, quoted

TOOL_CALL = ("<tool_call>", "</tool_call>")
FUNCTION = "<function="
_PARAMETER = ("<parameter=", "</parameter>")
_FUNCTION_ENDS = tuple(f"</function>{gap}{TOOL_CALL[1]}" for gap in ("", "\n"))
_KEY = ("<arg_key>", "</arg_key>")
_VALUE = ("<arg_value>", "</arg_value>")
_STRING: Types = frozenset(("string",))


def qwen_coder(calls: CallParser) -> Steps[None]:
    """`<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`, a line break
    inside each tag. Models omit the outer one; then functions must be declared."""
    cursor = calls.cursor
    marked = yield from cursor.skip(TOOL_CALL[0])
    while True:
        yield from cursor.spaces()
        yield from cursor.expect(FUNCTION)
        name = calls.named((yield from cursor.until(">")), declared=not marked)
        calls.start(name)
        yield from _parameters(calls, name)
        calls.whole()
        if (yield from calls.tail(TOOL_CALL[1])):
            return
        if (yield from cursor.ahead(len(FUNCTION))) != FUNCTION:
            return
        cursor.record()


def _parameters(calls: CallParser, name: str) -> Steps[None]:
    cursor, before = calls.cursor, "{"
    declared = calls.properties(name)
    ahead = dict.fromkeys(declared)
    while (yield from cursor.spaces()) == "<" and (yield from cursor.skip(_PARAMETER[0])):
        key = checked_name((yield from cursor.until(">")))
        ahead.pop(key, None)
        calls.arguments(f"{before}{quoted(key)}: ")
        if (yield from cursor.peek()) == "\n":
            cursor.take(cursor.at + 1)
        # A missing end is where the next argument begins, or where the call ends.
        following = [f"{_PARAMETER[0]}{each}>" for each in ahead] if declared else [f"\n{_PARAMETER[0]}"]
        yield from _value(calls, calls.types(name, key), (_PARAMETER[1], *following, *_FUNCTION_ENDS), "\n")
        before = ", "
    yield from cursor.expect("</function>")
    calls.arguments("{}" if before == "{" else "}")


def glm(calls: CallParser) -> Steps[None]:
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>`, in 4.5 with line
    breaks between the parts. Any text could be a name, so functions must be declared."""
    cursor = calls.cursor
    yield from cursor.expect(TOOL_CALL[0])
    found = yield from cursor.run(lambda sign: sign not in "\n<")
    if not (yield from cursor.peek()):
        raise Malformed
    name = calls.named(found, declared=True)
    calls.start(name)
    before = "{"
    while (yield from cursor.spaces()) == "<" and (yield from cursor.skip(_KEY[0])):
        key = checked_name((yield from cursor.until(_KEY[1])))
        calls.arguments(f"{before}{quoted(key)}: ")
        yield from cursor.spaces()
        yield from cursor.expect(_VALUE[0])
        yield from _value(calls, calls.types(name, key), _VALUE[1:])
        before = ", "
    yield from cursor.expect(TOOL_CALL[1])
    calls.arguments("{}" if before == "{" else "}")
    calls.whole()


def _value(calls: CallParser, types: Types, ends: tuple[str, ...], last: str = "") -> Steps[None]:
    """A value: strings as they come, others whole. See `_until`."""
    if types == _STRING:
        calls.arguments('"')
        yield from _until(calls.cursor, ends, last, lambda span: calls.arguments(inside(span)))
        calls.arguments('"')
        return
    parts: list[str] = []
    yield from _until(calls.cursor, ends, last, parts.append)
    calls.arguments(json_argument("".join(parts), types))


def _until(cursor: Cursor, ends: tuple[str, ...], last: str, out: Callable[[str], None]) -> Steps[None]:
    """Pass on the text up to one of `ends`, of which the first alone is taken, without `last` before it."""
    keep = ""

    def trimmed(span: str) -> None:
        nonlocal keep
        span = keep + span
        keep = last if last and span.endswith(last) else ""
        if span := span.removesuffix(keep):
            out(span)

    mark = yield from cursor.upto(ends, trimmed)
    if not mark:
        raise Malformed
    if mark == ends[0]:
        cursor.take(cursor.at + len(mark))
