"""Where a JSON value ends, found as its text comes.

A call's arguments may contain anything inside strings, the end tag too, so they are parsed and never
split on a tag. Each character is looked at once, runs inside strings in native code.
"""

from __future__ import annotations

import re
from collections.abc import Callable

MAX_DEPTH = 128
"""Nesting that is still followed: decoders at the other end give up at 100 to 1,000."""

_SPACES = re.compile(r"[ \t\n\r]*")
_SPECIAL = re.compile(r'["\\\x00-\x1f]')
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_HEX = frozenset("0123456789abcdefABCDEF")
_CLOSE = {"{": "}", "[": "]"}

# What may follow in a number, by what came last: minus, leading zero, integer, point, fraction, e,
# sign of the exponent, exponent.
_DIGITS = "0123456789"
_NUMBER: dict[str, dict[str, str]] = {
    "-": {"0": "0"} | dict.fromkeys("123456789", "i"),
    "0": {".": ".", "e": "e", "E": "e"},
    "i": {".": ".", "e": "e", "E": "e"} | dict.fromkeys(_DIGITS, "i"),
    ".": dict.fromkeys(_DIGITS, "f"),
    "f": {"e": "e", "E": "e"} | dict.fromkeys(_DIGITS, "f"),
    "e": {"+": "s", "-": "s"} | dict.fromkeys(_DIGITS, "x"),
    "s": dict.fromkeys(_DIGITS, "x"),
    "x": dict.fromkeys(_DIGITS, "x"),
}
_WHOLE = frozenset("0ifx")


class JsonScanner:
    """Accepts exactly one JSON value (RFC 8259), in pieces. Owner: event loop."""

    __slots__ = ("_key", "_left", "_number", "_stack", "_step", "done", "failed")

    def __init__(self) -> None:
        self._step: Callable[[str, int], int] = self._value
        self._stack: list[str] = []
        self._key = False
        """The string being read is a key."""
        self._left = ""
        """Of a literal: what must still come; of `\\u`: one character a digit."""
        self._number = ""
        self.done = False
        """The value is whole. A number is only when something else follows it."""
        self.failed = False
        """No value can begin like this."""

    def scan(self, text: str, start: int = 0) -> int:
        """Take from text[start:] what belongs to the value; returns where that ends. Before
        `len(text)` only when `done` or `failed`, then text[end] does not belong to it."""
        at, size = start, len(text)
        while at < size and not (self.done or self.failed):
            at = self._step(text, at)
        return at

    # -- each takes something at `at`, or fails there ----------------------------------------------

    def _value(self, text: str, at: int) -> int:
        at = _spaces(text, at)
        if at == len(text):
            return at
        sign = text[at]
        if sign == '"':
            self._key = False
            self._step = self._string
        elif sign in "{[":
            return self._open(sign, at)
        elif sign in _LITERALS:
            self._left = _LITERALS[sign][1:]
            self._step = self._literal
        elif sign == "-" or "0" <= sign <= "9":
            self._number = sign if sign in "-0" else "i"
            self._step = self._digits
        else:
            return self._fail(at)
        return at + 1

    def _open(self, sign: str, at: int) -> int:
        if len(self._stack) == MAX_DEPTH:
            return self._fail(at)
        self._stack.append(sign)
        self._step = self._first_key if sign == "{" else self._first_item
        return at + 1

    def _first_item(self, text: str, at: int) -> int:
        at = _spaces(text, at)
        if at < len(text) and text[at] == "]":
            return self._closed(at)
        return self._value(text, at)

    def _first_key(self, text: str, at: int) -> int:
        at = _spaces(text, at)
        if at < len(text) and text[at] == "}":
            return self._closed(at)
        return self._next_key(text, at)

    def _next_key(self, text: str, at: int) -> int:
        at = _spaces(text, at)
        if at == len(text):
            return at
        if text[at] != '"':
            return self._fail(at)
        self._key = True
        self._step = self._string
        return at + 1

    def _colon(self, text: str, at: int) -> int:
        at = _spaces(text, at)
        if at == len(text):
            return at
        if text[at] != ":":
            return self._fail(at)
        self._step = self._value
        return at + 1

    def _comma(self, text: str, at: int) -> int:
        at = _spaces(text, at)
        if at == len(text):
            return at
        inside = self._stack[-1]
        if text[at] == _CLOSE[inside]:
            return self._closed(at)
        if text[at] != ",":
            return self._fail(at)
        self._step = self._next_key if inside == "{" else self._value
        return at + 1

    def _string(self, text: str, at: int) -> int:
        found = _SPECIAL.search(text, at)
        if found is None:
            return len(text)
        at = found.start()
        if text[at] == '"':
            if self._key:
                self._step = self._colon
            else:
                self._ended()
        elif text[at] == "\\":
            self._step = self._escape
        else:
            return self._fail(at)
        return at + 1

    def _escape(self, text: str, at: int) -> int:
        if text[at] == "u":
            self._left = "0000"
            self._step = self._hex
        elif text[at] in '"\\/bfnrt':
            self._step = self._string
        else:
            return self._fail(at)
        return at + 1

    def _hex(self, text: str, at: int) -> int:
        if text[at] not in _HEX:
            return self._fail(at)
        self._left = self._left[1:]
        if not self._left:
            self._step = self._string
        return at + 1

    def _literal(self, text: str, at: int) -> int:
        if text[at] != self._left[0]:
            return self._fail(at)
        self._left = self._left[1:]
        if not self._left:
            self._ended()
        return at + 1

    def _digits(self, text: str, at: int) -> int:
        following = _NUMBER[self._number].get(text[at])
        if following is not None:
            self._number = following
            return at + 1
        if self._number not in _WHOLE:
            return self._fail(at)
        self._ended()
        return at

    # -- ends --------------------------------------------------------------------------------------

    def _closed(self, at: int) -> int:
        self._stack.pop()
        self._ended()
        return at + 1

    def _ended(self) -> None:
        if self._stack:
            self._step = self._comma
        else:
            self.done = True

    def _fail(self, at: int) -> int:
        self.failed = True
        return at


def _spaces(text: str, at: int) -> int:
    found = _SPACES.match(text, at)
    return at if found is None else found.end()
