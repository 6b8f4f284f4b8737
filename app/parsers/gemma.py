"""Calls of FunctionGemma and Gemma 4, whose strings stand between marks of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from app.parsers.calls import CallParser, Format
from app.parsers.cursor import Cursor, Malformed, Steps, checked_name
from app.parsers.json_scan import MAX_DEPTH
from app.parsers.pythonic import MAX_NUMBER
from app.parsers.typed import Types, inside, json_value, quoted


class Marks(NamedTuple):
    """Special tokens around a call, and on both sides of a string."""

    begin: str
    end: str
    quote: str


FUNCTION_GEMMA = Marks("<start_function_call>", "<end_function_call>", "<escape>")
GEMMA_4 = Marks("<|tool_call>", "<tool_call|>", '<|"|>')

_Out = Callable[[str], None]
"""Takes what was read, as JSON."""


def gemma(marks: Marks) -> Format:
    """`call:name{key:value,...}` between `marks`. Strings may also stand as in JSON, as a grammar writes them
    inside lists and objects, or bare."""

    def read(calls: CallParser) -> Steps[None]:
        cursor = calls.cursor
        yield from cursor.expect(marks.begin)
        yield from cursor.spaces()
        yield from cursor.expect("call:")
        name = yield from cursor.run(lambda sign: sign not in "{<\n")
        if not (yield from cursor.peek()):
            raise Malformed
        yield from _arguments(calls, calls.named(name), marks.quote)
        calls.whole()
        yield from calls.tail(marks.end)

    return read


def _arguments(calls: CallParser, name: str, quote: str) -> Steps[None]:
    """Reported from the first key on."""
    cursor, before = calls.cursor, "{"
    yield from cursor.expect("{")
    while (yield from cursor.spaces()) != "}":
        key = yield from _key(cursor)
        yield from cursor.expect(":")
        if before == "{":
            calls.start(name)
        calls.arguments(f"{before}{quoted(key)}: ")
        yield from _value(cursor, calls.arguments, quote, calls.types(name, key), 0)
        before = ", "
        if (yield from cursor.spaces()) != ",":
            break
        cursor.take(cursor.at + 1)
    yield from cursor.expect("}")
    if before == "{":
        calls.start(name)
    calls.arguments("{}" if before == "{" else "}")


def _key(cursor: Cursor) -> Steps[str]:
    return checked_name((yield from cursor.run(lambda sign: sign not in ':,{}[]"<\n')))


def _value(cursor: Cursor, out: _Out, quote: str, types: Types, depth: int) -> Steps[None]:
    sign = yield from cursor.spaces()
    if depth == MAX_DEPTH or sign == "":
        raise Malformed
    if sign == '"':
        yield from cursor.value(out)
    elif sign in ("[", "{"):
        yield from _items(cursor, out, quote, "[]" if sign == "[" else "{}", depth)
    elif (yield from cursor.skip(quote)):
        out('"')
        if not (yield from cursor.upto((quote,), lambda span: out(inside(span)))):
            raise Malformed
        cursor.take(cursor.at + len(quote))
        out('"')
    else:
        word = (yield from cursor.run(lambda sign: sign not in ',{}[]"<\n', MAX_NUMBER)).strip()
        if not word:
            raise Malformed
        out(json_value(word, types))


def _items(cursor: Cursor, out: _Out, quote: str, brackets: str, depth: int) -> Steps[None]:
    """A list or an object."""
    yield from cursor.expect(brackets[0])
    out(brackets[0])
    before = ""
    while (sign := (yield from cursor.spaces())) != brackets[1]:
        out(before)
        before = ", "
        if brackets == "{}":
            if sign == '"':
                yield from cursor.value(out)
                yield from cursor.spaces()
            else:
                out(quoted((yield from _key(cursor))))
            yield from cursor.expect(":")
            out(": ")
        yield from _value(cursor, out, quote, None, depth + 1)
        if (yield from cursor.spaces()) != ",":
            break
        cursor.take(cursor.at + 1)
    yield from cursor.expect(brackets[1])
    out(brackets[1])
