"""Calls written as a Python list, `[f(a=1, b="x"), g()]`, and Python's literals, as JSON."""

from __future__ import annotations

import re
from collections.abc import Callable

from app.parsers.calls import CallParser
from app.parsers.cursor import Cursor, Malformed, Steps
from app.parsers.json_scan import MAX_DEPTH
from app.parsers.typed import WORDS, Types, inside, is_json, json_value, quoted

MARKS = ("<|python_start|>", "<|python_end|>")
"""Llama 4's marks around the list."""
OLMO = ("<function_calls>", "</function_calls>")
"""OLMo 3's marks around the calls."""
NAME_CHARS = 64

_PLAIN = re.compile(r"[^'\"\\\x00-\x1f]+")
_WORD = re.compile(r"[A-Za-z0-9_.+-]")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "'": "'", '"': '"', "\\": "\\", "\n": ""}
_DIGITS = {"x": 2, "u": 4, "U": 8}
MAX_LITERAL = 16 * 1024
"""Characters of a value that is read in one go: 5 ms."""
MAX_NUMBER = 512
"""Characters of a number: longer ones no decoder takes."""

Out = Callable[[str], None]
"""Takes what was read, as JSON."""


def json_argument(text: str, types: Types) -> str:
    """See `json_value`. A list or dict may be a Python literal, too."""
    bare, structured = text.strip(), types is not None and types & {"array", "object"}
    made = json_value(text, types)
    if made[0] != '"' or not structured or bare[:1] not in ("[", "{") or len(bare) > MAX_LITERAL:
        return made
    cursor, parts = Cursor(), list[str]()
    cursor.push(bare)
    cursor.ended = True
    try:
        next(_literal(cursor, parts.append, 0))
    except StopIteration:
        kind = "array" if bare[0] == "[" else "object"
        if cursor.at == len(bare) and kind in structured:
            return "".join(parts)
    except Malformed:
        pass
    return made


def pythonic(calls: CallParser) -> Steps[None]:
    """An answer that is a list of calls, from its first character on. Functions must be declared."""
    cursor = calls.cursor
    yield from cursor.spaces()
    yield from cursor.expect("[")
    while (yield from _call(calls, declared=True)) == ",":
        cursor.record()
        cursor.take(cursor.at + 1)
    if (yield from calls.tail("]")):
        yield from cursor.skip(MARKS[1])


def olmo(calls: CallParser) -> Steps[None]:
    """`<function_calls>f(a=1, b="x")</function_calls>`, a line each. Values may be JSON's, too."""
    cursor = calls.cursor
    yield from cursor.expect(OLMO[0])
    while (yield from _call(calls)) and not (yield from calls.tail(OLMO[1])):
        cursor.record()
        yield from cursor.skip(",")


def _call(calls: CallParser, declared: bool = False) -> Steps[str]:
    """One call; the character behind it and the white space after it."""
    cursor = calls.cursor
    yield from cursor.spaces()
    name = yield from _identifier(cursor)
    yield from cursor.spaces()
    yield from cursor.expect("(")
    yield from _arguments(calls, calls.named(name, declared))
    calls.whole()
    return (yield from calls.gap())


def _arguments(calls: CallParser, function: str) -> Steps[None]:
    """Reported from the first name on: what is no call (`[f(x) for x in y]`) mostly fails before."""
    cursor = calls.cursor
    yield from arguments(
        calls, function, "=)", lambda: _identifier(cursor), lambda _: _literal(cursor, calls.arguments, 0)
    )


def arguments(
    calls: CallParser,
    function: str,
    signs: str,
    name: Callable[[], Steps[str]],
    value: Callable[[str], Steps[None]],
) -> Steps[None]:
    """Arguments with commas between them, each a name, `signs[0]` and a value; then `signs[1]`. `name` reads
    one, `value` reads and reports that of a name. The call is reported from the first name on."""
    cursor, before = calls.cursor, "{"
    while (yield from cursor.spaces()) != signs[1]:
        key = yield from name()
        yield from cursor.spaces()
        yield from cursor.expect(signs[0])
        if before == "{":
            calls.start(function)
        calls.arguments(f"{before}{quoted(key)}: ")
        yield from value(key)
        before = ", "
        if (yield from cursor.spaces()) != ",":
            break
        cursor.take(cursor.at + 1)
    yield from cursor.expect(signs[1])
    if before == "{":
        calls.start(function)
    calls.arguments("{}" if before == "{" else "}")


def items(
    cursor: Cursor, out: Out, brackets: str, key: Callable[[], Steps[None]], value: Callable[[], Steps[None]]
) -> Steps[None]:
    """A list, `[]`, or an object, `{}`, to `out` as JSON. `key` and `value` read one each, to `out`, too."""
    yield from cursor.expect(brackets[0])
    out(brackets[0])
    before = ""
    while (yield from cursor.spaces()) != brackets[1]:
        out(before)
        before = ", "
        if brackets == "{}":
            yield from key()
            yield from cursor.spaces()
            yield from cursor.expect(":")
            out(": ")
        yield from value()
        if (yield from cursor.spaces()) != ",":
            break
        cursor.take(cursor.at + 1)
    yield from cursor.expect(brackets[1])
    out(brackets[1])


def _identifier(cursor: Cursor) -> Steps[str]:
    name = yield from cursor.run(lambda sign: sign.isalnum() or sign in "_-.", NAME_CHARS)
    if not name:
        raise Malformed
    return name


def _literal(cursor: Cursor, out: Out, depth: int) -> Steps[None]:
    sign = yield from cursor.spaces()
    if depth == MAX_DEPTH or sign == "":
        raise Malformed
    if sign in "'\"":
        out('"')
        yield from _string(cursor, out)
        out('"')
    elif sign in ("[", "{"):
        yield from items(
            cursor,
            out,
            "[]" if sign == "[" else "{}",
            lambda: _key(cursor, out),
            lambda: _literal(cursor, out, depth + 1),
        )
    else:
        out((yield from _word(cursor)))


def _key(cursor: Cursor, out: Out) -> Steps[None]:
    """The key of a dict, which must be a string."""
    sign = yield from cursor.peek()
    if not sign or sign not in "'\"":
        raise Malformed
    yield from _literal(cursor, out, 0)


def _word(cursor: Cursor) -> Steps[str]:
    word = yield from cursor.run(_WORD.fullmatch, MAX_NUMBER)
    word = WORDS.get(word, word)
    if not is_json(word):
        raise Malformed
    return word


def _string(cursor: Cursor, out: Out) -> Steps[None]:
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
            out(inside((yield from _escape(cursor))))
            continue
        run = _PLAIN.match(cursor.text, cursor.at)
        end = cursor.at + 1 if run is None else run.end()  # the other quote, a control character
        out(inside(cursor.take(end)))


def _escape(cursor: Cursor) -> Steps[str]:
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
