"""JSON Schemas before they are compiled: how large, and what a backend would silently loosen.

A keyword that a library ignores makes an answer that looks constrained and is not, so the whole
schema is walked first and the request refused with the keyword named. Only real subschema positions
count: a property called "not" is a name, `not` beside `type` is a keyword.

Formats hold as far as a regular language goes: leap years, leap seconds and the tables of IDNA are out
of reach. `contentEncoding` and `contentMediaType` are annotations, as the standard has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


def subschemas(root: Json) -> Iterator[Place]:
    """Every subschema, the root first. Draft 4 to 2020-12 positions."""
    ahead = [Place(root, "#")]
    while ahead:
        place = ahead.pop()
        yield place
        schema, path = place
        if not isinstance(schema, Mapping):
            continue
        for key in _IN_MAP:
            if isinstance(found := schema.get(key), Mapping):
                ahead += [Place(child, f"{path}/{key}/{name}") for name, child in found.items()]
        for key in _IN_LIST:
            if isinstance(found := schema.get(key), list):
                ahead += [Place(child, f"{path}/{key}/{i}") for i, child in enumerate(found)]
        for key in _SINGLE:
            found = schema.get(key)
            if isinstance(found, Mapping | bool):
                ahead.append(Place(found, f"{path}/{key}"))
            elif isinstance(found, list):  # `items` of draft 4
                ahead += [Place(child, f"{path}/{key}/{i}") for i, child in enumerate(found)]


def check_schema(root: Json) -> None:
    """Raise `Refused` for what no backend carries out, naming keyword and place."""
    if not isinstance(root, Mapping | bool):
        raise Refused("The schema must be a JSON object or a boolean.")
    for schema, path in subschemas(root):
        if not isinstance(schema, Mapping | bool):
            raise Refused(f"The schema at {path} must be an object or a boolean.")
        if isinstance(schema, Mapping):
            for key in _UNSUPPORTED:
                if key in schema:
                    refuse(key, path)
            if schema.get("uniqueItems") not in (None, False):
                refuse("uniqueItems", path)
            _check_count(schema, path)
            if path != "#" and "$ref" in schema and isinstance(schema.get("$id", schema.get("id")), str):
                # Up to draft 7 the id is ignored there, later it changes what the reference means.
                refuse("$id", path, "beside '$ref' is not supported")


def _check_count(schema: Mapping[str, Json], path: str) -> None:
    """An object may repeat a key, and whoever parses it counts once: beyond the required properties,
    which differ, only the first member is sure."""
    least, required = schema.get("minProperties", 0), schema.get("required")
    sure = max(len(required), 1) if isinstance(required, list) else 1
    if isinstance(least, int | float) and least > sure:
        refuse("minProperties", path, "is not supported beyond the number of required properties")


def refuse(keyword: str, path: str, why: str = "is not supported") -> None:
    """Raise `Refused` in one wording."""
    raise Refused(f"The schema keyword '{keyword}' at {path[:200]} {why}.")
