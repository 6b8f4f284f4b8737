"""Schemas rewritten for the backends without changing what they accept."""

from __future__ import annotations

import re

from gpu.grammar.schema import Json, objects, refuse, values

_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_MAY_CONTROL = re.compile(r"\\u00[01]|\\u007[fF]|\x7f|\\\\[xucv0ae]")
"""Matches what a control character looks like in a schema's text, in one of its strings or in a pattern."""
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Characters that JSON writes as \\u00XX alone."""
_PATTERN_CONTROL = re.compile(rf"{_CONTROL.pattern}|\\[xucv0ae]")


def normalise(root: Json) -> None:
    """Rewrite `root` in place: counts as integers, and without keywords that constrain nothing."""
    for schema, _ in objects(root):
        for key in _COUNTS:
            if isinstance(count := schema.get(key), float) and count.is_integer():
                schema[key] = int(count)
        if schema.get("uniqueItems") is False:
            del schema["uniqueItems"]
        if schema.get("propertyNames") in (True, {}, {"type": "string"}):  # every name is a string
            del schema["propertyNames"]


def allow_control_characters(root: Json, text: str) -> bool:
    """Whether `root`, whose JSON is `text`, contains control characters, which llguidance drops unless \\u
    escapes are allowed. If so, objects are rewritten in place: with those escapes, "\\u0061" would count as
    an additional property beside a declared "a", except under `patternProperties`. Raises `Refused` for
    an object that cannot be rewritten."""
    if not _MAY_CONTROL.search(text) or not any(_has_control(schema) for schema, _ in objects(root)):
        return False
    for schema, path in objects(root):
        if not (schema.get("properties") or schema.get("patternProperties")):
            continue
        further = schema.get("additionalProperties", True)
        if further is False:
            continue
        if further not in (True, {}) or schema.get("patternProperties"):
            refuse("additionalProperties", path, "must be false in a schema with control characters")
        schema["patternProperties"], schema["additionalProperties"] = {"": {}}, False
    return True


def _has_control(schema: dict[str, Json]) -> bool:
    patterns = [schema.get("pattern"), *(schema.get("patternProperties") or ())]
    return any(isinstance(one, str) and _PATTERN_CONTROL.search(one) for one in patterns) or any(
        # Keys of constants are written as they are.
        isinstance(one, str) and _CONTROL.search(one)
        for one in values([schema.get("const"), schema.get("enum")])
    )
