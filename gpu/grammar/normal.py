"""Schemas respelled for the backends; what they ask for stays the same."""

from __future__ import annotations

import re
from typing import Any

from gpu.grammar.schema import Json, refuse, subschemas, values

_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_MAY_CONTROL = re.compile(r"\\u00[01]|\\u007[fF]|\x7f|\\\\[xucv0ae]")
"""Of a schema's text: what a control character in one of its strings looks like, or in a pattern."""
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Characters that JSON writes as \\u00XX alone."""
_PATTERN_CONTROL = re.compile(rf"{_CONTROL.pattern}|\\[xucv0ae]")


def normalise(root: Json) -> bool:
    """Respell `root` in place. Whether anything was changed."""
    changed = False
    for schema, _ in subschemas(root):
        if not isinstance(schema, dict):
            continue
        for key in _COUNTS:
            if isinstance(count := schema.get(key), float) and count.is_integer():
                schema[key] = int(count)
                changed = True
        for key in [key for key in ("uniqueItems", "propertyNames") if key in schema and _idle(key, schema)]:
            del schema[key]
            changed = True
    return changed


def _idle(key: str, schema: dict[str, Any]) -> bool:
    """Whether the keyword asks for nothing: every name is a string."""
    if key == "uniqueItems":
        return schema[key] is False
    return schema[key] in (True, {}, {"type": "string"})


def writes_controls(root: Json, text: str) -> bool:
    """Whether `root`, whose JSON is `text`, asks for control characters, which llguidance drops unless it may
    write \\u escapes. If so, objects are respelled in place: with those escapes, "\\u0061" would be a name
    of its own beside a declared "a", except under a pattern of names. Raises `Refused` for an object that
    cannot be respelled."""
    if not _MAY_CONTROL.search(text) or not any(map(_has_control, (place[0] for place in subschemas(root)))):
        return False
    for schema, path in subschemas(root):
        if not isinstance(schema, dict) or not (schema.get("properties") or schema.get("patternProperties")):
            continue
        further = schema.get("additionalProperties", True)
        if further is False:
            continue
        if further not in (True, {}) or schema.get("patternProperties"):
            refuse("additionalProperties", path, "must be false in a schema with control characters")
        schema["patternProperties"], schema["additionalProperties"] = {"": {}}, False
    return True


def _has_control(schema: Json) -> bool:
    if not isinstance(schema, dict):
        return False
    patterns = [schema.get("pattern"), *(schema.get("patternProperties") or ())]
    return any(isinstance(one, str) and _PATTERN_CONTROL.search(one) for one in patterns) or any(
        # Keys of constants are written as they are.
        isinstance(one, str) and _CONTROL.search(one)
        for one in values([schema.get("const"), schema.get("enum")])
    )
