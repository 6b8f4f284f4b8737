"""Regexes as clients mean them, in the notation of llguidance."""

from __future__ import annotations

import re

_ASCII = {
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[0-9A-Za-z_]",
    r"\W": "[^0-9A-Za-z_]",
    r"\s": r"[\t\n\x0B\f\r\x20]",
    r"\S": r"[^\t\n\x0B\f\r\x20]",
}
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")
_ESCAPED = re.compile(r"\\.", re.DOTALL)


def ascii_classes(pattern: str) -> str:
    """`pattern` with \\d, \\w and \\s for ASCII alone, as vLLM's and SGLang's backends have them and as every
    reader of a number expects: llguidance would write any Unicode digit. Inside brackets too, where a
    class may hold another."""
    return _ESCAPED.sub(lambda found: _ASCII.get(found[0], found[0]), pattern)


def literal(text: str) -> str:
    """A pattern for `text` itself."""
    return _SPECIAL.sub(r"\\\g<0>", text).replace("\n", r"\n")
