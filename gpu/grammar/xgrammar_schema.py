"""Schemas inside structural tags: refuses what xgrammar 0.2 would silently ignore.

Measured keyword by keyword and over the official JSON-Schema-Test-Suite. The first of a node's `$ref`, const,
enum, anyOf, oneOf, allOf and type wins and the rest is dropped; patterns and lengths emit raw quotes and
tabs, which are not JSON. Everything that would be dropped is refused here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from gpu.grammar.schema import Json, Refused, check_schema, objects, refuse

_FORMATS = frozenset(
    ("time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uri-reference", "uuid", "json-pointer")
)
"""Not date and date-time: xgrammar takes the 30th of February."""
_INSIDE = (
    "cannot be held to, with this model's vocabulary, where tool calls, thinking or tags of your own stand "
    "around the JSON: leave it out of the schema, or ask for the JSON without tools and thinking"
)
"""Says what a client can do, who need not know of structural tags."""
_KEYS: Mapping[str, frozenset[str]] = {
    "object": frozenset(("properties", "required", "additionalProperties")),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems")),
    "string": frozenset(("format",)),
    "integer": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    "number": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    "boolean": frozenset(),
    "null": frozenset(),
}
"""What may stand beside a type. Absent on purpose: pattern, minLength, maxLength (raw quotes and tabs),
multipleOf, patternProperties, minProperties, maxProperties."""

_FIRST = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, Mapping),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
}
_WORD = 2**53
_POINTER = re.compile(r"#(/\$defs/|/definitions/)[^/%~]+|#")


def check_exact(root: Json) -> None:
    """Raise `Refused` for a schema that xgrammar would not enforce exactly."""
    check_schema(root)
    if root is False:
        raise Refused("The schema false allows nothing.")
    for schema, path in objects(root):
        _check_node(schema, path)


def close_objects(root: Json) -> None:
    """Set `additionalProperties` to false in objects that declare properties, in place: xgrammar would let
    an escaped key ("\\u0061" is "a") past the declared one's schema."""
    for schema, _ in objects(root):
        if schema.get("properties"):
            schema["additionalProperties"] = False


def _check_node(schema: Mapping[str, Json], path: str) -> None:
    keys = set(schema) & _KNOWN
    first = next((key for key in _FIRST if key in schema), None)
    if first is not None:
        _check_first(first, schema, keys, path)
        return
    if not keys:
        return  # any value
    kinds: Json = schema.get("type")
    listed: list[Any] = kinds if isinstance(kinds, list) else [kinds]
    if "type" not in keys:
        refuse(min(keys), path, "needs a 'type' beside it")
    for kind in listed:
        if not isinstance(kind, str) or kind not in _KEYS:
            refuse("type", path, f"has the unknown value {kind!r:.40}")
    allowed = frozenset().union(*(_KEYS[kind] for kind in listed)) | {"type"}
    for key in sorted(keys - allowed):
        refuse(key, path, _INSIDE)
    _check_values(schema, path)


def _check_first(first: str, schema: Mapping[str, Json], keys: set[str], path: str) -> None:
    """A keyword that makes xgrammar ignore the ones beside it."""
    beside = keys - {first}
    if first in ("const", "enum"):
        values = [schema[first]] if first == "const" else schema[first]
        if not isinstance(values, list) or not values:
            refuse(first, path, "needs at least one value")
        if not _match_type(values, schema.get("type")):
            refuse("type", path, f"contradicts '{first}' beside it")
        beside -= {"type"}
    if beside:
        refuse(min(beside), path, f"beside '{first}' {_INSIDE}")
    if first == "$ref" and not (isinstance(schema[first], str) and _POINTER.fullmatch(schema[first])):
        refuse(first, path, "must point to '#', '#/$defs/NAME' or '#/definitions/NAME' in structural tags")
    if first in ("anyOf", "oneOf", "allOf"):
        _check_branches(first, schema[first], path)


def _check_branches(keyword: str, branches: Json, path: str) -> None:
    if not isinstance(branches, list) or not branches:
        refuse(keyword, path, "needs at least one branch")
    if any(branch is False for branch in branches):
        refuse(keyword, path, f"with a branch 'false' {_INSIDE}")
    if keyword == "allOf" and len(branches) > 1:
        refuse(keyword, path, f"of several schemas {_INSIDE}")
    if keyword == "oneOf" and not _disjoint(branches):
        refuse(keyword, path, "needs branches of different types in structural tags")


def _disjoint(branches: list[Json]) -> bool:
    """Whether no value can match two branches: all have one type, and none twice."""
    kinds = [branch.get("type") for branch in branches if isinstance(branch, Mapping)]
    plain = len(kinds) == len(branches) and all(isinstance(kind, str) for kind in kinds)
    numbers = {"integer", "number"} <= {kind for kind in kinds if isinstance(kind, str)}
    return plain and len(set(kinds)) == len(kinds) and not numbers


def _match_type(values: list[Json], kinds: Json) -> bool:
    listed = kinds if isinstance(kinds, list) else [kinds]
    known = [kind for kind in listed if isinstance(kind, str) and kind in _TYPES]
    return kinds is None or all(any(_TYPES[kind](v) for kind in known) for v in values)


def _check_values(schema: Mapping[str, Json], path: str) -> None:
    required, properties = schema.get("required", []), schema.get("properties", {})
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        refuse("required" if isinstance(properties, Mapping) else "properties", path, "has the wrong type")
    for name in required:
        if not isinstance(name, str) or name not in properties:
            refuse("required", path, f"names {name!r:.60}, which is not among the properties")
    if any(value is False for value in properties.values()):
        refuse("properties", path, f"with a schema 'false' {_INSIDE}")
    if isinstance(schema.get("items"), list):
        refuse("items", path, "as a list is not supported in structural tags: use 'prefixItems'")
    form = schema.get("format", "time")
    if not isinstance(form, str) or form not in _FORMATS:
        refuse("format", path, f"of value {schema['format']!r:.60} {_INSIDE}")
    for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minItems", "maxItems"):
        value = schema.get(key, 0)
        if not _TYPES["number"](value) or abs(value) > _WORD:
            refuse(key, path, "must be a number of at most 53 bits")


_KNOWN = frozenset().union(
    *_KEYS.values(),
    _FIRST,
    ("type", "pattern", "minLength", "maxLength", "multipleOf", "patternProperties", "minProperties"),
    ("maxProperties", "additionalItems", "$dynamicAnchor", "contentEncoding", "contentMediaType"),
)
"""Keywords that constrain. Others are annotations, which no validator reads either."""
