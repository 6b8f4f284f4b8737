"""How large a constraint may be, and from where on it is compiled in the helper first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gpu.grammar.schema import Json, Refused, decode
from gpu.grammar.xgr import check_tag, light


class Size(NamedTuple):
    """Bytes of text: the most that is taken, and the most that a thread compiles unseen."""

    most: int
    direct: int


SIZES = {
    "json_object": Size(0, 0),
    # 11,279 real schemas: the largest is 166 KB, the slowest took 2 s, the 250 above 32 KB 5 to 65 ms.
    # What grows with the square is the number of an object's optional properties: see `runs_away`.
    "json_schema": Size(512 * 1024, 192 * 1024),
    # A regex of 1 MB compiles in 0.1 s but holds one step for 0.9 s; 37 KB of words cost 0.2 ms.
    "regex": Size(64 * 1024, 8 * 1024),
    "ebnf": Size(64 * 1024, 8 * 1024),
    "choice": Size(256 * 1024, 64 * 1024),
    "structural_tag": Size(256 * 1024, 4 * 1024),
    # A structural tag as llguidance reads it: 300 bytes of options come with each schema.
    "lark": Size(2**20, 192 * 1024),
}


WIDE = 16 * 1024
"""Bytes below which no object can have too many members to be worth counting."""
MAX_DIRECT = 1_000
"""Members of one object or list: 1,000 optional properties compile in 0.1 s, 10,000 in 10."""


def check_text(kind: str, text: str) -> None:
    """Raise `Refused` for a constraint that is too long, empty, or not text."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise Refused("The constraint has a lone surrogate; it is not valid Unicode text.") from error
    if size > SIZES[kind].most:
        raise Refused(f"The constraint has {size:,} bytes; {kind} takes at most {SIZES[kind].most:,}.")
    if not size and kind != "json_object":
        raise Refused("The constraint is empty.")


def runs_away(kind: str, text: str) -> bool:
    """Whether compiling could take seconds or gigabytes. Raises `Refused` for a bad structural tag."""
    if kind == "structural_tag":
        return not light(check_tag(text)) or len(text) > SIZES[kind].direct
    if kind == "lark" and any(_line_runs_away(line) for line in text.split("\n")):
        return True
    if kind == "json_schema" and len(text) > WIDE and _widest(decode(text)) > MAX_DIRECT:
        return True
    return len(text) > SIZES[kind].direct


def _line_runs_away(line: str) -> bool:
    """The same for a rule of Lark: a schema, or letters."""
    body = line.partition(": ")[2]
    if body.startswith("%json "):
        return runs_away("json_schema", body.removeprefix("%json "))
    return runs_away("regex", body)


def _widest(value: Json) -> int:
    """Members of the largest object or list in `value`."""
    most, ahead = 0, [value]
    while ahead:
        node = ahead.pop()
        if isinstance(node, Mapping | list):
            most = max(most, len(node))
            ahead += node.values() if isinstance(node, Mapping) else node
    return most
