"""Calls whose arguments stand one by one between tags, told as JSON while they come."""

from __future__ import annotations

from app.parsers.calls import CallParser, held
from app.parsers.cursor import NAME_CHARS, Malformed, Steps
from app.parsers.typed import Types, inside, quoted, spelled

TOOL_CALL = ("<tool_call>", "</tool_call>")
FUNCTION = "<function="
_PARAMETER = ("<parameter=", "</parameter>")
_KEY = ("<arg_key>", "</arg_key>")
_VALUE = ("<arg_value>", "</arg_value>")
_STRING: Types = frozenset(("string",))


def qwen_coder(calls: CallParser) -> Steps[None]:
    """`<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`, a line break
    inside each tag. Models forget the outer one; what they then call must be declared."""
    cursor = calls.cursor
    marked = yield from cursor.skip(TOOL_CALL[0])
    while True:
        yield from cursor.spaces()
        yield from cursor.expect(FUNCTION)
        name = _name((yield from cursor.until(">")))
        if not marked:
            calls.declared(name)
        calls.start(name)
        yield from _parameters(calls, name)
        calls.whole()
        if (yield from cursor.spaces()) != "<" or (yield from cursor.skip(TOOL_CALL[1])):
            return
        if (yield from cursor.ahead(len(FUNCTION))) != FUNCTION:
            return
        cursor.record()


def _parameters(calls: CallParser, name: str) -> Steps[None]:
    cursor, before = calls.cursor, "{"
    while (yield from cursor.spaces()) == "<" and (yield from cursor.skip(_PARAMETER[0])):
        key = _name((yield from cursor.until(">")))
        calls.arguments(f"{before}{quoted(key)}: ")
        if (yield from cursor.peek()) == "\n":
            cursor.take(cursor.at + 1)
        yield from _value(calls, calls.types(name, key), _PARAMETER[1], "\n")
        before = ", "
    yield from cursor.expect("</function>")
    calls.arguments("{}" if before == "{" else "}")


def glm(calls: CallParser) -> Steps[None]:
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>`, in 4.5 with line
    breaks between the parts. Any text could be a name, so functions must be declared."""
    cursor = calls.cursor
    yield from cursor.expect(TOOL_CALL[0])
    parts: list[str] = []
    while (yield from cursor.peek()) not in "\n<":  # the empty string at the end is in it
        parts.append(cursor.take(cursor.at + 1))
        if len(parts) > NAME_CHARS:
            raise Malformed
    name = _name("".join(parts))
    calls.declared(name)
    calls.start(name)
    before = "{"
    while (yield from cursor.spaces()) == "<" and (yield from cursor.skip(_KEY[0])):
        key = _name((yield from cursor.until(_KEY[1])))
        calls.arguments(f"{before}{quoted(key)}: ")
        yield from cursor.spaces()
        yield from cursor.expect(_VALUE[0])
        yield from _value(calls, calls.types(name, key), _VALUE[1])
        before = ", "
    yield from cursor.expect(TOOL_CALL[1])
    calls.arguments("{}" if before == "{" else "}")
    calls.whole()


def _value(calls: CallParser, types: Types, end: str, last: str = "") -> Steps[None]:
    """A value up to `end`, and what belongs to the tag before that: strings as they come, others whole."""
    live = types == _STRING
    parts: list[str] = []
    if live:
        calls.arguments('"')
    keep = ""
    while True:
        cursor = calls.cursor
        found = cursor.text.find(end, cursor.at)
        ahead = found if found >= 0 else len(cursor.text) - held(cursor.text, cursor.at, (end,))
        span = keep + cursor.take(ahead)
        keep = last if last and span.endswith(last) else ""
        span = span.removesuffix(keep)
        if live and span:
            calls.arguments(inside(span))
        elif span:
            parts.append(span)
        if found >= 0:
            cursor.take(found + len(end))
            break
        if cursor.ended:
            raise Malformed
        yield
    calls.arguments('"' if live else spelled("".join(parts), types))


def _name(text: str) -> str:
    name = text.strip()
    if not name:
        raise Malformed
    return name
