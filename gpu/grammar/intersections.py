"""Constraints of a schema that may apply to one value at once.

llguidance intersects them when it compiles, at a cost that grows exponentially with their number, and keeps
the automata.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Final

from gpu.grammar.schema import ANNOTATIONS, Json, decode, objects, refuse

MOST_STRINGS: Final = 12
"""String constraints that are intersected without a trial: 14 patterns take 0.01 s and 3 MB, 17 take 0.1 s
and 28 MB, 20 take 1.5 s and 240 MB. 49 of MaskBench's 11,279 schemas have more."""
MOST_STATES: Final = 10_000
"""States of the automaton of a divisor: one of 99,991 took 2.6 s, and 119 MB for as long as it is cached."""
_DOUBLED: Final = 22
"""Constraints whose intersection takes a gigabyte, half of that with one less: more do not pass the trial."""

_OF_STRINGS = ("pattern", "format")
_LENGTHS = frozenset(("minLength", "maxLength"))


def meeting_strings(root: Json) -> int:
    """String constraints (patterns, formats, lengths) that may meet on one value: those below an `allOf`, or
    below a `$ref` that has constraints beside it. At most and roughly: properties of different names count
    too, and a reference stands for the whole schema."""
    below: dict[int, dict[str, Json]] = {}
    for joint in (schema for schema, _ in objects(root) if _joins(schema)):
        if id(joint) not in below:
            below |= {id(schema): schema for schema, _ in objects(joint)}
    if any("$ref" in schema for schema in below.values()):
        below = {id(schema): schema for schema, _ in objects(root)}
    return sum(map(_strings, below.values()))


def drop_large_divisors(root: Json, lenient: bool) -> list[str]:
    """Remove each `multipleOf` whose automaton, or that with others that may meet it, would have more than
    `MOST_STATES` states, and return their descriptions. Where it is not `lenient`, raises `Refused`."""
    dropped, states = [], 1
    joint = any(_joins(schema) for schema, _ in objects(root))
    for schema, path in list(objects(root)):
        together = math.lcm(states, period(schema)) if joint else period(schema)
        if together <= MOST_STATES:
            states = together
        elif lenient:
            dropped.append(f"'multipleOf' at {path[:200]}")
            del schema["multipleOf"]
        else:
            refuse(
                "multipleOf",
                path,
                f"needs {together:,} states, with the divisors that it may meet; at most {MOST_STATES:,} are "
                "supported",
            )
    return dropped


def _joins(schema: Mapping[str, Json]) -> bool:
    parts = schema.get("allOf")
    count = len(parts) if isinstance(parts, list) else 0
    count += "$ref" in schema
    own = schema.keys() - ANNOTATIONS - {"allOf", "$ref"}
    return count > 0 and count + bool(own) > 1


def _strings(schema: Mapping[str, Json]) -> int:
    count = sum(isinstance(schema.get(key), str) for key in _OF_STRINGS)
    return count + (not _LENGTHS.isdisjoint(schema))


def period(schema: Mapping[str, Json]) -> int:
    """States of the automaton for a schema's `multipleOf`, roughly: the divisor's digits without zeros at the
    end, an eighth of them where they are a multiple of eight. 1 where there is none."""
    divisor = schema.get("multipleOf")
    if isinstance(divisor, bool) or not isinstance(divisor, int | float) or not math.isfinite(divisor):
        return 1
    digits = "".join(map(str, Decimal(str(divisor)).as_tuple().digits))
    states = int(digits.rstrip("0") or "1")
    return states // math.gcd(states, 8)


def kept_bytes(kind: str, text: str) -> int:
    """Memory that a compiled constraint keeps for intersections and divisors, roughly."""
    total = 0
    for schema in schemas(kind, text):
        met = meeting_strings(schema)
        total += (256 << min(met, _DOUBLED)) if met else 0
        total += sum(500 * states for each, _ in objects(schema) if (states := period(each)) > 1)
    return total


def schemas(kind: str, text: str) -> Iterator[Json]:
    """The schemas of a constraint: itself, or those of the rules of a Lark grammar."""
    if kind == "json_schema":
        yield decode(text)
    elif kind == "lark":
        for line in text.split("\n"):
            body = line.partition(": ")[2]
            if body.startswith("%json "):
                yield decode(body.removeprefix("%json "))
