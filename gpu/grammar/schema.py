"""JSON Schemas before they are compiled: how large, and what a backend would silently loosen.

A keyword that a library ignores makes an answer that looks constrained and is not, so the whole
schema is walked first and the request refused with the keyword named. Only real subschema positions
count: a property called "not" is a name, `not` beside `type` is a keyword.

Formats hold, or are narrowed to what a regular language has of them (`gpu/grammar/formats.py`).
`contentEncoding` and `contentMediaType` are annotations, as the standard has them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

MAX_DEPTH = 120
"""Containers inside each other. llguidance's own JSON reader stops at 128."""
MAX_NODES = 100_000
"""Values in a schema. The largest of MaskBench's 11,279 has 12,000."""

Json = Any


class Refused(Exception):
    """The constraint cannot be honoured. The message is for the client."""


class Place(NamedTuple):
    """A subschema and the JSON pointer that leads to it."""

    schema: Json
    path: str


_IN_MAP = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_IN_LIST = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = (
    "additionalItems",
    "additionalProperties",
    "contains",
    "contentSchema",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
)

_POSITIONS = frozenset((*_IN_MAP, *_IN_LIST, *_SINGLE))
"""Where subschemas stand. A list may stand in a single one's place: `items` of draft 4."""

_UNSUPPORTED = (
    "not",
    "if",
    "then",
    "else",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "contains",
    "minContains",
    "maxContains",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$recursiveRef",
    "x-guidance",
)
"""Keywords of neither backend. llguidance says so itself but for the last, by which a schema could
tell it to be lenient; xgrammar drops most of them without a word."""


def decode(text: str, what: str = "The schema") -> Json:
    """`text` as JSON. Raises `Refused` when it is none, too deep or too large."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise Refused(f"{what} is not valid JSON: {error}.") from error
    except RecursionError as error:
        raise Refused(f"{what} is nested too deeply: at most {MAX_DEPTH} levels.") from error
    check_size(value, what)
    return value


def check_size(value: Json, what: str) -> None:
    """Raise `Refused` for more than `MAX_NODES` values or `MAX_DEPTH` levels."""
    level, depth, nodes = [value], 0, 0
    while level:
        nodes += len(level)
        depth += 1
        if nodes > MAX_NODES:
            raise Refused(f"{what} has more than {MAX_NODES:,} values.")
        if depth > MAX_DEPTH:
            raise Refused(f"{what} is nested too deeply: at most {MAX_DEPTH} levels.")
        level = [child for parent in level for child in _children(parent)]


def _children(value: Json) -> Iterator[Json]:
    if isinstance(value, Mapping):
        return iter(value.values())
    return iter(value if isinstance(value, list) else ())


def values(root: Json, skipped: str = "") -> Iterator[Json]:
    """Every value in `root`, itself first; without those of members named `skipped`."""
    ahead = [root]
    while ahead:
        node = ahead.pop()
        yield node
        if isinstance(node, Mapping):
            ahead += [inner for key, inner in node.items() if key != skipped]
        elif isinstance(node, list):
            ahead += node


def subschemas(root: Json) -> Iterator[Place]:
    """Every subschema, the root first. Draft 4 to 2020-12 positions."""
    ahead = [Place(root, "#")]
    while ahead:
        place = ahead.pop()
        yield place
        schema, path = place
        if not isinstance(schema, Mapping):
            continue
        for key, found in schema.items():
            if key not in _POSITIONS:
                continue
            if isinstance(found, list) and key not in _IN_MAP:
                ahead += [Place(child, f"{path}/{key}/{i}") for i, child in enumerate(found)]
            elif key in _IN_MAP and isinstance(found, Mapping):
                ahead += [Place(child, f"{path}/{key}/{name}") for name, child in found.items()]
            elif key in _SINGLE and isinstance(found, Mapping | bool):
                ahead.append(Place(found, f"{path}/{key}"))


def objects(root: Json) -> Iterator[tuple[dict[str, Json], str]]:
    """Every subschema that is an object, with its place."""
    return ((schema, path) for schema, path in subschemas(root) if isinstance(schema, dict))


class Fault(NamedTuple):
    """A keyword that no backend carries out."""

    keyword: str
    schema: Json
    path: str
    why: str = "is not supported"


def check_schema(root: Json) -> None:
    """Raise `Refused` for what no backend carries out, naming keyword and place."""
    for fault in faults(root):
        refuse(fault.keyword, fault.path, fault.why)


def loosen(root: Json) -> list[str]:
    """Take out of `root` what no backend carries out, and tell what that was. Raises `Refused` for what
    is no schema."""
    dropped = []
    for keyword, schema, path, _ in list(faults(root, _unreachable)):
        dropped.append(f"'{keyword}' at {path[:200]}")
        del schema[keyword]
    return dropped


_REGEX_BEYOND = re.compile(r"\(\?<?[=!]|\\[1-9]|\\k<|\\[bB]")
"""Of a pattern: what no regular language has, or llguidance does not know."""


def _unreachable(schema: Mapping[str, Json]) -> Iterator[str]:
    """Keywords that llguidance refuses with its own words, also where it is told to be lenient."""
    if isinstance(pattern := schema.get("pattern"), str) and _REGEX_BEYOND.search(pattern):
        yield "pattern"
    if isinstance(target := schema.get("$ref"), str) and not target.startswith("#"):
        yield "$ref"
    names = schema.get("patternProperties")
    if isinstance(names, Mapping) and (len(names) > 1 or any(map(_REGEX_BEYOND.search, names))):
        yield "patternProperties"


def faults(
    root: Json, more: Callable[[Mapping[str, Json]], Iterable[str]] = lambda schema: ()
) -> Iterator[Fault]:
    """What no backend carries out, and `more`. Raises `Refused` for what is no schema."""
    if not isinstance(root, Mapping | bool):
        raise Refused("The schema must be a JSON object or a boolean.")
    for schema, path in subschemas(root):
        if not isinstance(schema, Mapping | bool):
            raise Refused(f"The schema at {path} must be an object or a boolean.")
        if isinstance(schema, Mapping):
            for key in (*_UNSUPPORTED, *more(schema)):
                if key in schema:
                    yield Fault(key, schema, path)
            if schema.get("uniqueItems") not in (None, False):
                yield Fault("uniqueItems", schema, path)
            if _counts_too_far(schema):
                why = "is not supported beyond the number of required properties"
                yield Fault("minProperties", schema, path, why)
            if path != "#" and "$ref" in schema:
                # Up to draft 7 the id is ignored there, later it changes what the reference means.
                for key in ("$id", "id"):
                    if isinstance(schema.get(key), str):
                        yield Fault(key, schema, path, "beside '$ref' is not supported")


def _counts_too_far(schema: Mapping[str, Json]) -> bool:
    """An object may repeat a key, and whoever parses it counts once: beyond the required properties,
    which differ, only the first member is sure."""
    least, required = schema.get("minProperties", 0), schema.get("required")
    sure = max(len(required), 1) if isinstance(required, list) else 1
    return isinstance(least, int | float) and least > sure


def refuse(keyword: str, path: str, why: str = "is not supported") -> None:
    """Raise `Refused` in one wording."""
    raise Refused(f"The schema keyword '{keyword}' at {path[:200]} {why}.")
