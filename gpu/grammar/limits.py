"""Size limits of constraints, and which are compiled in the helper process first."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from gpu.grammar.copies import COPY_COST, copies
from gpu.grammar.intersections import MOST_STRINGS, constants, meeting_strings, period, schemas
from gpu.grammar.schema import MAX_DEPTH, MAX_PATH, Json, Refused, decode, subschemas
from gpu.grammar.xgrammar_backend import check_tag, is_light


class Size(NamedTuple):
    """Bytes of text: the most accepted, and the most that a thread compiles without a trial."""

    most: int
    direct: int


SIZES = {
    "json_object": Size(0, 0),
    # Text costs nothing by itself (0.5 MB of descriptions 11 ms): see `schema_cost`.
    "json_schema": Size(512 * 1024, 512 * 1024),
    # A regex of 1 MB compiles in 0.1 s but holds one step for 0.9 s; 37 KB of words cost 0.2 ms.
    "regex": Size(64 * 1024, 8 * 1024),
    "ebnf": Size(64 * 1024, 8 * 1024),
    "choice": Size(256 * 1024, 64 * 1024),
    "structural_tag": Size(256 * 1024, 4 * 1024),
    # A structural tag as llguidance reads it: 300 bytes of options come with each schema.
    "lark": Size(2**20, 512 * 1024),
}


_OPTIONAL = re.compile("[?*{|]")
_OPERATORS = re.compile("[%&~]")
"""Intersections, complements and directives of a grammar. The library's fuel does not limit their cost."""
MAX_COST = 400_000
"""Microseconds that a compile in a thread may be expected to take. It cannot be stopped, but it releases the
GIL and ends; the helper would compile the same first, for as long, after a start of seconds."""
MAX_TARGETS = 500
"""Different references: the library follows a chain of them by recursion, and 1,500 overflow a
thread's stack, which ends the process."""


MAX_LEVELS = 1_000
"""Maximum sum of the depths at which references stand. The library resolves them by recursion, and 1,400
levels of properties overflow a thread's stack of 8 MB."""
MAX_CONSTANTS = 4_000
"""Members of constants, and required names: 40,000 overflow it, 20,000 take 3 s and 95 MB."""
MAX_REGEXES = 16 * 1024
"""Bytes of all regexes of a structural tag: 110 KB of optional letters took 7.5 s and a gigabyte."""


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


def needs_trial(kind: str, text: str) -> bool:
    """Whether compiling could take seconds or gigabytes. Raises `Refused` for a bad structural tag."""
    if kind == "structural_tag":
        return not is_light(check_tag(text)) or len(text) > SIZES[kind].direct
    if len(text) > SIZES[kind].direct:
        return True
    if kind == "lark":
        return _lark_needs_trial(text)
    if kind == "ebnf" and _OPERATORS.search(text):
        return True
    if kind in ("ebnf", "regex"):
        return regex_cost(text) > MAX_COST
    return kind == "json_schema" and schema_cost(decode(text)) > MAX_COST


def _lark_needs_trial(text: str) -> bool:
    """Whether rules of Lark, each a schema or letters, need a trial."""
    bodies = (line.partition(": ")[2] for line in text.split("\n"))
    letters = [body for body in bodies if not body.startswith("%json ")]
    if sum(map(len, letters)) > MAX_REGEXES or any(needs_trial("regex", body) for body in letters):
        return True
    return sum(map(schema_cost, schemas("lark", text))) > MAX_COST


def regex_cost(text: str) -> int:
    """Microseconds that llguidance takes for a regex, or for those of a grammar, at most and roughly:
    optional parts, one behind the other, count by their square. 4,000 times `.?` take 1.8 s and 280 MB, and
    40,000 times, as a schema's pattern, 22 s and 3 GB."""
    if len(text) > SIZES["regex"].direct:
        return MAX_COST + 1
    return 4 * len(text) + int(0.11 * len(_OPTIONAL.findall(text)) ** 2)


def schema_cost(root: Json) -> int:
    """Microseconds that llguidance takes for a schema, at most and roughly, on a slow core: a sum over its
    subschemas, in which lists of properties, branches and patterns of names count by their square.
    Infinite (`MAX_COST` + 1) with more than `MAX_TARGETS` references or `MAX_LEVELS` between them,
    `MAX_CONSTANTS`, or `MOST_STRINGS` constraints that may meet."""
    cost, targets = 0, dict[str, int]()
    for schema, path in subschemas(root):
        cost += 80
        if not isinstance(schema, Mapping):
            continue
        if isinstance(target := schema.get("$ref"), str):
            # Each target is entered once, from no deeper than this; a place that was cut may be anywhere.
            deep = MAX_DEPTH if len(path) > MAX_PATH else path.count("/")
            targets[target] = max(targets.get(target, 0), deep)
        if (states := period(schema)) > 1:
            cost += 25 * states
        for key, per_pair in _PAIRS:
            if isinstance(listed := schema.get(key), Mapping | list):
                cost += int(per_pair * len(listed) ** 2)
        if isinstance(listed := schema.get("enum"), list):
            cost += 5 * len(listed)
        cost += sum(map(regex_cost, _patterns(schema)))
    endless = (
        len(targets) > MAX_TARGETS
        or sum(targets.values()) > MAX_LEVELS
        or constants(root) > MAX_CONSTANTS
        or meeting_strings(root) > MOST_STRINGS
    )
    return MAX_COST + 1 if endless else cost + COPY_COST * copies(root)


def _patterns(schema: Mapping[str, Json]) -> Iterator[str]:
    """Regexes of a subschema itself."""
    if isinstance(pattern := schema.get("pattern"), str):
        yield pattern
    if isinstance(named := schema.get("patternProperties"), Mapping):
        yield from named


_PAIRS = (
    ("properties", 0.06),
    ("patternProperties", 25),  # each is held against each other one: 250 take 1.4 s
    ("anyOf", 0.05),
    ("oneOf", 0.2),
    ("allOf", 0.2),
    ("prefixItems", 0.01),
    ("items", 0.01),  # of draft 4
)
