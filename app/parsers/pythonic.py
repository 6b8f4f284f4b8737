"""Calls written as a Python list, `[f(a=1, b="x"), g()]`, and Python's literals, told as JSON."""

from __future__ import annotations

import re
from typing import Protocol

from app.parsers.calls import CallParser
from app.parsers.cursor import Cursor, Malformed, Steps
from app.parsers.json_scan import MAX_DEPTH
from app.parsers.typed import Types, inside, quoted, spelled

MARKS = ("<|python_start|>", "<|python_end|>")
"""Llama 4's, around the list."""
NAME_CHARS = 64

_PLAIN = re.compile(r"[^'\"\\\x00-\x1f]+")
_WORD = re.compile(r"[A-Za-z0-9_.+-]")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "'": "'", '"': '"', "\\": "\\", "\n": ""}
_DIGITS = {"x": 2, "u": 4, "U": 8}
MAX_LITERAL = 16 * 1024
"""Characters of a value that is read in one go: 5 ms."""
MAX_NUMBER = 512
"""Characters of a number: longer ones no decoder takes."""


class Told(Protocol):
    """What reads a literal: where it stands, and who is told of it as JSON."""

    cursor: Cursor

    def arguments(self, text: str) -> None:
        """More of it."""
        ...


class _Collected:
    """One that is there as a whole. Owner: event loop."""

    __slots__ = ("cursor", "parts")

    def __init__(self, text: str) -> None:
        self.cursor = Cursor()
        self.cursor.push(text)
        self.cursor.ended = True
        self.parts: list[str] = []

    def arguments(self, text: str) -> None:
        """See `Told`."""
        self.parts.append(text)


def written(text: str, types: Types) -> str:
    """A value as JSON, by what it may be: see `spelled`. A list or dict may be spelled as in Python, too."""
    bare, structured = text.strip(), types is not None and types & {"array", "object"}
    made = spelled(text, types)
    if made[0] != '"' or not structured or bare[:1] not in ("[", "{") or len(bare) > MAX_LITERAL:
        return made
    told = _Collected(bare)
    steps = _literal(told, 0)
    try:
        next(steps)
    except StopIteration:
        kind = "array" if bare[0] == "[" else "object"
        if told.cursor.at == len(bare) and kind in structured:
            return "".join(told.parts)
    except Malformed:
        pass
    return made


def pythonic(calls: CallParser) -> Steps[None]:
    """An answer that is such a list, from its first character on. Functions must be declared."""
    cursor = calls.cursor
    yield from cursor.spaces()
    yield from cursor.expect("[")
    while True:
        yield from cursor.spaces()
        name = yield from _identifier(calls)
        yield from cursor.spaces()
        yield from cursor.expect("(")
        calls.declared(name)
        yield from _arguments(calls, calls.named(name))
        calls.whole()
        if (yield from calls.gap()) != ",":
            if (yield from calls.tail("]")):
                yield from cursor.skip(MARKS[1])
            return
        cursor.record()
        cursor.take(cursor.at + 1)


def _arguments(calls: CallParser, function: str) -> Steps[None]:
    """Told from the first name on: what is no call (`[f(x) for x in y]`) mostly shows before."""
    cursor, before = calls.cursor, "{"
    while (yield from cursor.spaces()) != ")":
        name = yield from _identifier(calls)
        yield from cursor.spaces()
        yield from cursor.expect("=")
        if before == "{":
            calls.start(function)
        calls.arguments(f"{before}{quoted(name)}: ")
        yield from _literal(calls, 0)
        before = ", "
        if (yield from cursor.spaces()) != ",":
            break
        cursor.take(cursor.at + 1)
    yield from cursor.expect(")")
    if before == "{":
        calls.start(function)
    calls.arguments("{}" if before == "{" else "}")


def _identifier(calls: CallParser) -> Steps[str]:
    cursor, name = calls.cursor, ""
    while (sign := (yield from cursor.peek())).isalnum() or sign in ("_", "-", "."):
        name += cursor.take(cursor.at + 1)
        if len(name) > NAME_CHARS:
            raise Malformed
    if not name:
        raise Malformed
    return name


def _literal(calls: Told, depth: int) -> Steps[None]:
    sign = yield from calls.cursor.spaces()
    if depth == MAX_DEPTH:
        raise Malformed
    if sign == "":
        raise Malformed
    if sign in "'\"":
        calls.arguments('"')
        yield from _string(calls)
        calls.arguments('"')
    elif sign == "[":
        yield from _items(calls, "[]", depth)
    elif sign == "{":
        yield from _items(calls, "{}", depth)
    else:
        calls.arguments((yield from _word(calls)))


def _items(calls: Told, brackets: str, depth: int) -> Steps[None]:
    """A list or a dict, which is keyed by strings."""
    cursor = calls.cursor
    yield from cursor.expect(brackets[0])
    calls.arguments(brackets[0])
    first = True
    while (sign := (yield from cursor.spaces())) != brackets[1]:
        calls.arguments("" if first else ", ")
        first = False
        if brackets == "{}":
            if sign not in ("'", '"'):
                raise Malformed
            yield from _literal(calls, depth + 1)
            yield from cursor.spaces()
            yield from cursor.expect(":")
            calls.arguments(": ")
        yield from _literal(calls, depth + 1)
        if (yield from cursor.spaces()) != ",":
            break
        cursor.take(cursor.at + 1)
    yield from cursor.expect(brackets[1])
    calls.arguments(brackets[1])


def _word(calls: Told) -> Steps[str]:
    cursor, word = calls.cursor, ""
    while _WORD.fullmatch((yield from cursor.peek())):
        word += cursor.take(cursor.at + 1)
        if len(word) > MAX_NUMBER:
            raise Malformed
    if word in _WORDS:
        return _WORDS[word]
    if not _NUMBER.fullmatch(word):
        raise Malformed
    return word


def _string(calls: Told) -> Steps[None]:
    cursor = calls.cursor
    quote = cursor.take(cursor.at + 1)
    while True:
        sign = yield from cursor.peek()
        if sign == quote:
            cursor.take(cursor.at + 1)
            return
        if sign == "" or sign == "\n":
            raise Malformed
        if sign == "\\":
            cursor.take(cursor.at + 1)
            calls.arguments(inside((yield from _escape(calls))))
            continue
        run = _PLAIN.match(cursor.text, cursor.at)
        end = cursor.at + 1 if run is None else run.end()  # the other quote, a control character
        calls.arguments(inside(cursor.take(end)))


def _escape(calls: Told) -> Steps[str]:
    cursor = calls.cursor
    sign = yield from cursor.peek()
    if sign == "":
        raise Malformed
    cursor.take(cursor.at + 1)
    if sign in _ESCAPES:
        return _ESCAPES[sign]
    if sign not in _DIGITS:
        return "\\" + sign  # as Python reads it
    count = _DIGITS[sign]
    digits = yield from cursor.ahead(count)
    try:
        character = chr(int(digits, 16))
    except (ValueError, OverflowError):
        raise Malformed from None
    if len(digits) < count:
        raise Malformed
    cursor.take(cursor.at + count)
    return character
