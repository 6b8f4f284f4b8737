"""Values written without JSON, as JSON: the function's schema decides their types."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from app.parsers.json_scan import JsonScanner

Types = frozenset[str] | None
"""JSON Schema's names of types; None: unknown."""

_REFS = 8
"""References and branches that are followed inside each other."""
_LOOKS = 256
"""Subschemas looked at for one value: branches that refer to each other multiply, 60 of them to 17 s."""
WORDS = {"True": "true", "False": "false", "None": "null"}
"""Python's words for JSON's."""
_OF_VALUES: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    type(None): "null",
    list: "array",
    dict: "object",
}
_KINDS = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
_ALIASES = {
    alias: name
    for name, aliases in (
        ("string", "str text varchar char date datetime enum"),
        ("integer", "int int8 int16 int32 int64 uint uint8 uint16 uint32 uint64 long short bigint"),
        ("number", "num float float32 float64 double decimal"),
        ("boolean", "bool"),
        ("array", "arr list tuple set"),
        ("object", "dict map struct"),
        ("null", "none nil nonetype"),
    )
    for alias in (name, *aliases.split())
}
"""Names of types as people who write schemas by hand spell them, and JSON Schema's own."""


def types_of(schema: object, root: Mapping[str, Any]) -> Types:
    """Types that a value of a subschema of `root` may have."""
    try:
        return _types(schema, root, _REFS, iter(range(_LOOKS)))
    except StopIteration:
        return None


def _types(schema: object, root: Mapping[str, Any], depth: int, looks: Iterator[int]) -> Types:
    """`types_of` for a part of a schema. Raises `StopIteration` when `looks` are used up."""
    next(looks)
    if not isinstance(schema, Mapping) or not depth:
        return None
    if "$ref" in schema:
        return _types(_pointed(schema["$ref"], root), root, depth - 1, looks)
    if (kind := schema.get("type")) is not None:
        return _named(kind if isinstance(kind, list) else [kind])
    if (listed := listed_values(schema)) is not None:
        return frozenset(_OF_VALUES.get(kind, "number") for kind in set(map(type, listed)))
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list):
            found = [_types(each, root, depth - 1, looks) for each in schema[key]]
            return _of_branches(found, key == "allOf")
    return None


def listed_values(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that a schema lists. Clients that write unset fields send an `enum` of null with `const`."""
    if isinstance(values := schema.get("enum"), list):
        return values
    return [schema["const"]] if "const" in schema else None


def _named(kinds: list[object]) -> Types:
    """Types by their names; None where one is unknown."""
    found = [_ALIASES.get(kind.partition("[")[0].lower()) for kind in kinds if isinstance(kind, str)]
    return frozenset(name for name in found if name is not None) if all(found) else None


def _kind(text: str) -> str:
    """The type of a JSON value, by its first character."""
    return _KINDS.get(text[0], "number")


def _of_branches(found: list[Types], all_hold: bool) -> Types:
    known = [each for each in found if each is not None]
    if all_hold:
        return known[0] if known else None
    return frozenset().union(*known) if len(known) == len(found) else None


def json_value(text: str, types: Types) -> str:
    """A value as JSON. It is what it looks like if it may be that, and text otherwise."""
    bare = text.strip()
    bare = WORDS.get(bare, bare)
    if is_json(bare):
        kind = _kind(bare)
        fits = types is None or kind in types or (kind == "number" and "integer" in types)
        if fits and (types is None or kind != "string"):
            return bare
    return quoted(text)


def members(arguments: str) -> dict[str, Any]:
    """The complete members of an object whose end may be missing."""
    found: dict[str, Any] = {}
    decode, at = json.JSONDecoder().raw_decode, _past("{", arguments, 0)
    try:
        while arguments[at] == '"':
            key, end = decode(arguments, at)
            value, end = decode(arguments, _past(":", arguments, end))
            if end == len(arguments):  # a number may go on
                break
            found[key] = value
            at = _past(",", arguments, end)
    except (ValueError, IndexError, RecursionError):
        pass
    return found


def _past(sign: str, text: str, at: int) -> int:
    """The position behind white space and `sign`."""
    while text[at : at + 1] in (" ", "\t", "\n", "\r", sign):
        at += 1
    return at


def inside(text: str) -> str:
    """`text` as it stands in a JSON string. Half a surrogate pair stays an escape."""
    return json.dumps(text, ensure_ascii=not encodable(text))[1:-1]


def quoted(text: str) -> str:
    """`text` as a JSON string."""
    return f'"{inside(text)}"'


def encodable(text: str) -> bool:
    """Whether `text` has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_json(text: str) -> bool:
    """Whether `text` is one JSON value, without white space around it."""
    scanner = JsonScanner()
    return bool(text) and scanner.scan(text + "\n") == len(text) and scanner.done


def _pointed(pointer: object, root: Mapping[str, Any]) -> object:
    """The subschema that a reference within `root` points to, None for any other reference."""
    if not isinstance(pointer, str) or not pointer.startswith("#"):
        return None
    found: object = root
    for part in pointer.split("/")[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found
