"""Where a JSON value ends, found as its text comes.

A call's arguments may contain anything inside strings, the end tag too, so they are parsed and never
split on a tag. Each character is looked at once, runs inside strings in native code.
"""

from __future__ import annotations

import re

MAX_DEPTH = 128
"""Nesting that is still followed: decoders at the other end give up at 100 to 1,000."""

_SPECIAL = re.compile(r'["\\\x00-\x1f]')
_SPACES = " \t\n\r"
_DIGITS = "0123456789"

# Characters that may come next, by state: each to the state behind it. In a container just opened that is
# `{ first` or `[ first`, after a value in it `{ value` or `[ value`.
_END, _CLOSE, _DONE = "end of a value", "end of a container", "done"
_VALUE = {
    '"': "string",
    **{sign: sign for sign in "{[tfn-0"},
    **dict.fromkeys("123456789", "integer"),
    **dict.fromkeys(_SPACES, "value"),
}
_EXPONENT = {"e": "e", "E": "e"}
_NEXT: dict[str, dict[str, str]] = {
    "value": _VALUE,
    "[ first": _VALUE | {"]": _CLOSE} | dict.fromkeys(_SPACES, "[ first"),
    "[ value": {",": "value", "]": _CLOSE} | dict.fromkeys(_SPACES, "[ value"),
    "{ first": {'"': "key", "}": _CLOSE} | dict.fromkeys(_SPACES, "{ first"),
    "{ key": {":": "value"} | dict.fromkeys(_SPACES, "{ key"),
    "{ value": {",": "{ value,", "}": _CLOSE} | dict.fromkeys(_SPACES, "{ value"),
    "{ value,": {'"': "key"} | dict.fromkeys(_SPACES, "{ value,"),
    "-": {"0": "0"} | dict.fromkeys("123456789", "integer"),
    "0": {".": "."} | _EXPONENT,
    "integer": {".": "."} | _EXPONENT | dict.fromkeys(_DIGITS, "integer"),
    ".": dict.fromkeys(_DIGITS, "fraction"),
    "fraction": _EXPONENT | dict.fromkeys(_DIGITS, "fraction"),
    "e": dict.fromkeys("+-", "sign") | dict.fromkeys(_DIGITS, "exponent"),
    "sign": dict.fromkeys(_DIGITS, "exponent"),
    "exponent": dict.fromkeys(_DIGITS, "exponent"),
}
for _string, _behind in (("string", _END), ("key", "{ key")):
    _NEXT[_string] = {'"': _behind, "\\": f"{_string} \\"}
    _NEXT[f"{_string} \\"] = dict.fromkeys('"\\/bfnrt', _string) | {"u": f"{_string} \\u"}
    for _read in ("u", "u0", "u00", "u000"):
        _after = _string if _read == "u000" else f"{_string} \\{_read}0"
        _NEXT[f"{_string} \\{_read}"] = dict.fromkeys("0123456789abcdefABCDEF", _after)
for _literal in ("true", "false", "null"):
    for _at in range(1, len(_literal)):
        _NEXT[_literal[:_at]] = {_literal[_at]: _END if _at == len(_literal) - 1 else _literal[: _at + 1]}
_STRINGS = frozenset(("string", "key"))
_NESTING = frozenset(("{", "[", _END, _CLOSE))
_NUMBERS = frozenset(("0", "integer", "fraction", "exponent"))
"""States in which a number may end."""


class JsonScanner:
    """Accepts exactly one JSON value (RFC 8259), in pieces. Owner: event loop."""

    def __init__(self) -> None:
        self._state = "value"
        self._stack = [_DONE]
        """The states behind the values that are open."""
        self.done = False
        """The value is complete. A number is only when something else follows it."""
        self.failed = False
        """No value can begin like this."""

    def scan(self, text: str, start: int = 0) -> int:
        """Take from text[start:] what belongs to the value; returns where that ends. Before
        `len(text)` only when `done` or `failed`, then text[end] does not belong to it."""
        at, size, state = start, len(text), self._state
        while at < size and not (self.done or self.failed):
            if state in _STRINGS:
                found = _SPECIAL.search(text, at)
                if found is None:
                    at = size
                    break
                at = found.start()
            following = _NEXT[state].get(text[at])
            if following is not None:
                at += 1
            elif state in _NUMBERS:  # it ended before this character
                following = _END
            else:
                self.failed = True
                break
            state = following
            if following in _NESTING:
                state = self._nested(following)
                at -= self.failed
        self._state = state
        return at

    def _nested(self, mark: str) -> str:
        """The state behind a value, or within a container: one that is nested too deep fails."""
        if mark in ("{", "["):
            self.failed = len(self._stack) > MAX_DEPTH
            self._stack.append(f"{mark} value")
            return f"{mark} first"
        if mark == _CLOSE:
            self._stack.pop()
        self.done = len(self._stack) == 1
        return self._stack[-1]
