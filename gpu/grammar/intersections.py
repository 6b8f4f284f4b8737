"""Constraints of a schema that may apply to one value at once.

llguidance intersects them when it compiles, at a cost that grows exponentially with their number, and keeps
the automata.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Final

from gpu.grammar.copies import COPY_BYTES, copies
from gpu.grammar.schema import MAX_PATH, Json, decode, joins, objects, refuse, values

MOST_STRINGS: Final = 12
"""String constraints that are intersected without a trial: 14 patterns take 0.01 s and 3 MB, 17 take 0.1 s
and 28 MB, 20 take 1.5 s and 240 MB. 49 of MaskBench's 11,279 schemas have more."""
MOST_STATES: Final = 10_000
"""States of the automaton of a divisor: one of 99,991 took 2.6 s, and 119 MB for as long as it is cached."""
_EXACT: Final = 2**53
_DOUBLED: Final = 22
"""Constraints whose intersection takes a gigabyte, half of that with one less: more do not pass the trial."""

_PROPERTY = re.compile(r"/properties(/[^/]*)(?:/(?:allOf|anyOf|oneOf)/[0-9]+)*$")
_OF_STRINGS = ("pattern", "format")
_LENGTHS = frozenset(("minLength", "maxLength"))


def meeting_strings(root: Json) -> int:
    """String constraints (patterns, formats, lengths) that may meet on one value: those below a subschema
    that joins several, which meet where they describe properties of one name, or where one describes no
    property. At most and roughly: the logarithm of the sum of 2 to their number, over the names. A reference
    stands for the whole schema."""
    below: dict[int, tuple[str, dict[str, Json]]] = {}
    for joint, _ in objects(root):
        if joins(joint) and id(joint) not in below:
            below |= _named(joint)
    if any("$ref" in schema for _, schema in below.values()):
        below = _named(root)
    counts = Counter[str]()
    for name, schema in below.values():
        counts[name] += _strings(schema)
    anywhere = counts.pop("", 0)
    together = [anywhere + count for count in counts.values()] or [anywhere]
    return sum(1 << min(count, 64) for count in together).bit_length() - 1 if any(together) else 0


def _named(root: Json) -> dict[int, tuple[str, dict[str, Json]]]:
    """Subschemas by identity, each with the name of the property that it describes ("": none)."""
    named = {}
    for schema, path in objects(root):
        found = _PROPERTY.search(path) if len(path) < MAX_PATH else None
        named[id(schema)] = (found[1] if found else "", schema)
    return named


def drop_large_divisors(root: Json, lenient: bool) -> list[str]:
    """Remove each `multipleOf` whose automaton, or that with others that may meet it, would have more than
    `MOST_STATES` states, and return their descriptions. Where it is not `lenient`, raises `Refused`."""
    dropped, states = [], 1
    joint = any(joins(schema) for schema, _ in objects(root))
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


def constants(root: Json) -> int:
    """Members of constants and enumerated values, at any depth, and required names, which the library follows
    by recursion."""
    count = 0
    for schema, _ in objects(root):
        count += len(schema["required"]) if isinstance(schema.get("required"), list) else 0
        for key in ("const", "enum"):
            listed = schema.get(key)
            nested = (each for each in values(listed) if isinstance(each, list | Mapping))
            count += sum(len(each) for each in nested if key == "const" or each is not listed)
    return count


def _strings(schema: Mapping[str, Json]) -> int:
    count = sum(isinstance(schema.get(key), str) for key in _OF_STRINGS)
    return count + (not _LENGTHS.isdisjoint(schema))


def period(schema: Mapping[str, Json]) -> int:
    """States of the automaton for a schema's `multipleOf`, roughly: the divisor's digits without zeros at the
    end, an eighth of them where they are a multiple of eight. 1 where there is none."""
    divisor = schema.get("multipleOf")
    if isinstance(divisor, bool) or not isinstance(divisor, int | float):
        return 1
    if not abs(divisor) < _EXACT:  # of ten thousand digits, or infinite
        return _EXACT
    digits = "".join(map(str, Decimal(str(divisor)).as_tuple().digits))
    states = int(digits.rstrip("0") or "1")
    return states // math.gcd(states, 8)


def kept_bytes(kind: str, text: str) -> int:
    """Memory that a compiled constraint keeps for intersections, divisors and copies, roughly."""
    total = 0
    for schema in schemas(kind, text):
        met = meeting_strings(schema)
        total += (256 << min(met, _DOUBLED)) if met else 0
        total += sum(500 * states for each, _ in objects(schema) if (states := period(each)) > 1)
        total += 5_000 * constants(schema) + COPY_BYTES * copies(schema)
    return total


def schemas(kind: str, text: str) -> Iterator[Json]:
    """Yield the schemas in a constraint: a JSON schema itself, or those in the rules of a Lark grammar."""
    if kind == "json_schema":
        yield decode(text)
    elif kind == "lark":
        for line in text.split("\n"):
            body = line.partition(": ")[2]
            if body.startswith("%json "):
                yield decode(body.removeprefix("%json "))
