"""Calls of FunctionGemma and Gemma 4, whose strings stand between marks of their own."""

from __future__ import annotations

from typing import NamedTuple

from app.parsers.calls import CallParser, Format
from app.parsers.cursor import Cursor, Malformed, Steps, checked_name
from app.parsers.json_scan import MAX_DEPTH
from app.parsers.pythonic import MAX_NUMBER, Out, arguments, items
from app.parsers.typed import Types, inside, json_value, quoted


class Marks(NamedTuple):
    """Special tokens around a call, and on both sides of a string."""

    begin: str
    end: str
    quote: str


FUNCTION_GEMMA = Marks("<start_function_call>", "<end_function_call>", "<escape>")
GEMMA_4 = Marks("<|tool_call>", "<tool_call|>", '<|"|>')


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
        name = calls.named(name)
        yield from cursor.expect("{")
        yield from arguments(
            calls,
            name,
            ":}",
            lambda: _key(cursor),
            lambda key: _value(cursor, calls.arguments, marks.quote, calls.types(name, key), 0),
        )
        calls.whole()
        yield from calls.tail(marks.end)

    return read


def _key(cursor: Cursor) -> Steps[str]:
    return checked_name((yield from cursor.run(lambda sign: sign not in ':,{}[]"<\n')))


def _value(cursor: Cursor, out: Out, quote: str, types: Types, depth: int) -> Steps[None]:
    sign = yield from cursor.spaces()
    if depth == MAX_DEPTH or sign == "":
        raise Malformed
    if sign == '"':
        yield from cursor.value(out)
    elif sign in ("[", "{"):
        yield from items(
            cursor,
            out,
            "[]" if sign == "[" else "{}",
            lambda: _item_key(cursor, out),
            lambda: _value(cursor, out, quote, None, depth + 1),
        )
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


def _item_key(cursor: Cursor, out: Out) -> Steps[None]:
    if (yield from cursor.peek()) == '"':
        yield from cursor.value(out)
    else:
        out(quoted((yield from _key(cursor))))
