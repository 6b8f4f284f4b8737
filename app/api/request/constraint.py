"""The constraint of a request in all its spellings: OpenAI's, SGLang's, vLLM's and vLLM's older ones.

All spellings become one form here; the compiler decides whether it is supported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from app.api.request.schema import ExtensionFields
from app.http.body import check_depth
from core.errors import RequestError, field_error
from core.grammar import GrammarKind, GrammarSpec

_PLAIN: Mapping[str, GrammarKind] = {
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "ebnf",
    "grammar": "ebnf",
    "structural_tag": "structural_tag",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "ebnf",
}
"""Fields of a body: SGLang's, among them `json_schema` and `grammar` as llama.cpp names them (its GBNF is
what `ebnf` takes), then vLLM's before 0.12."""

_STRUCTURED: Mapping[str, GrammarKind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
    "structural_tag": "structural_tag",
}
"""Members of vLLM's `structured_outputs`, beside `json_object`, which is a flag."""

_WHITESPACE = ("disable_any_whitespace", "whitespace_pattern", "disable_additional_properties")
"""Options of `structured_outputs` that are not supported."""

_FORMATS: Mapping[str, frozenset[str]] = {
    "text": frozenset(),
    "json_object": frozenset(("schema",)),
    "json_schema": frozenset(("json_schema", "schema")),
    "structural_tag": frozenset(("format", "structures", "triggers")),
}
"""Types of `response_format` and what may stand beside each."""
_SCHEMA_KEYS = frozenset(("name", "description", "schema", "strict"))
"""Fields of `response_format.json_schema`."""

CONSTRAINTS = frozenset({*_PLAIN, "structured_outputs", "response_format"})
"""All fields of a body that constrain its output."""


MAX_TEXT = 512 * 1024
"""Characters of one constraint: as many as any kind may have when it is compiled (`gpu/grammar/limits.py`).
Before that it may be read on the loop."""


class _Constraint(NamedTuple):
    """One constraint as it was sent."""

    param: str
    kind: GrammarKind
    value: Any
    lenient: bool = False


def constraint_of(body: ExtensionFields, sampling: ExtensionFields | None = None) -> GrammarSpec | None:
    """The one constraint of a request, or None. `sampling` is its `sampling_params`, if they have the same
    fields. Raises `RequestError` for two constraints (naming both) and for one that is not of its type."""
    sent = _constraints(body, "")
    if sampling is not None:
        sent += _constraints(sampling, "sampling_params.")
    if not sent:
        return None
    if len(sent) > 1:
        raise RequestError(
            f"'{sent[0].param}' and '{sent[1].param}' cannot both constrain the output: give one.",
            sent[1].param,
        )
    param, kind, value, lenient = sent[0]
    text = _text(kind, value, param)
    if len(text) > MAX_TEXT:
        raise field_error(param, f"has {len(text):,} characters; at most {MAX_TEXT:,} are taken")
    return GrammarSpec(kind, text, param, lenient)


def structured_outputs(spec: GrammarSpec) -> dict[str, object]:
    """The constraint as the field `structured_outputs` spells it."""
    for name, kind in _STRUCTURED.items():
        if kind == spec.kind:
            return {name: msgspec.json.decode(spec.text) if kind == "choice" else spec.text}
    return {"json_object": True}


def _constraints(body: ExtensionFields, prefix: str) -> list[_Constraint]:
    return [*_plain(body, prefix), *_structured(body, prefix), *_response_format(body, prefix)]


def _plain(body: ExtensionFields, prefix: str) -> Iterator[_Constraint]:
    for name, kind in _PLAIN.items():
        if (value := getattr(body, name)) is not None:
            yield _Constraint(prefix + name, kind, value)


def _structured(body: ExtensionFields, prefix: str) -> Iterator[_Constraint]:
    options = body.structured_outputs
    if options is None:
        return
    param = prefix + "structured_outputs"
    if not isinstance(options, dict):
        raise field_error(param, "must be an object")
    _check_keys(options, frozenset((*_STRUCTURED, *_WHITESPACE, "json_object")), param)
    for name in _WHITESPACE:
        if options.get(name) not in (None, False):
            raise field_error(f"{param}.{name}", "is not supported", "unsupported")
    flag = options.get("json_object")
    if not isinstance(flag, bool | None):
        raise field_error(f"{param}.json_object", "must be true or false")
    if not flag and all(options.get(name) is None for name in _STRUCTURED):
        raise field_error(param, f"is empty: give {', '.join(_STRUCTURED)} or json_object")
    for name, kind in _STRUCTURED.items():
        if options.get(name) is not None:
            yield _Constraint(f"{param}.{name}", kind, options[name])
    if flag:
        yield _Constraint(f"{param}.json_object", "json_object", "")


def _response_format(body: ExtensionFields, prefix: str) -> Iterator[_Constraint]:
    format = body.response_format
    if format is None:
        return
    param = prefix + "response_format"
    kind = format.get("type") if isinstance(format, dict) else None
    if not isinstance(kind, str):
        raise RequestError(f"'{param}' must be an object with a 'type'.", param + ".type")
    if kind not in _FORMATS:
        raise RequestError(
            f"'{param}' of type '{kind[:40]}' is not supported: use {', '.join(_FORMATS)}.",
            param + ".type",
            "unsupported",
        )
    _check_keys(format, _FORMATS[kind] | {"type"}, param)
    match kind:
        case "json_object" if format.get("schema") is None:
            yield _Constraint(param, "json_object", "")
        case "json_object":
            yield _Constraint(param + ".schema", "json_schema", format["schema"])
        case "json_schema":
            yield _schema(format, param)
        case "structural_tag":
            yield _Constraint(param, "structural_tag", format)


def _schema(format: Mapping[str, Any], param: str) -> _Constraint:
    """OpenAI's `json_schema` object, or llama.cpp's bare `schema` in its place."""
    inner = format.get("json_schema")
    if inner is None and format.get("schema") is not None:
        return _Constraint(param + ".schema", "json_schema", format["schema"])
    where = param + ".json_schema"
    if not isinstance(inner, dict) or inner.get("schema") is None or format.get("schema") is not None:
        raise field_error(where, "must be an object with a 'schema'")
    _check_keys(inner, _SCHEMA_KEYS, where)
    strict = inner.get("strict")
    if not isinstance(strict, bool | None):
        raise field_error(where + ".strict", "must be true or false")
    # OpenAI's default is false, which promises nothing. Here an absent `strict` means true: keywords that
    # cannot be enforced are an error; with false they are a warning.
    return _Constraint(param, "json_schema", inner["schema"], strict is False)


def _check_keys(given: Mapping[str, Any], known: frozenset[str], param: str) -> None:
    """Refuse unknown keys: the client expects them to constrain the output."""
    if (name := next((name for name in given if name not in known), None)) is not None:
        where = f"{param}.{name[:60]}"
        raise field_error(where, f"is not known: '{param}' takes {', '.join(sorted(known))}")


def _text(kind: GrammarKind, value: Any, param: str) -> str:
    """The value as the compiler takes it."""
    match kind:
        case "json_object":
            return ""
        case "regex" | "ebnf":
            if not isinstance(value, str):
                raise field_error(param, "must be a string")
        case "choice":
            if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
                raise field_error(param, "must be a list of strings")
    if value in ("", []):
        raise field_error(param, "is empty, which constrains nothing: leave it out")
    return value if isinstance(value, str) else _json(kind, value, param)


def _json(kind: GrammarKind, value: Any, param: str) -> str:
    if not isinstance(value, dict | bool | list) or (isinstance(value, list) and kind != "choice"):
        raise field_error(param, "must be a JSON object, or one as a string")
    check_depth(value, param)
    if kind == "structural_tag" and isinstance(value, dict) and "structures" in value:
        value = _triggered(value, param)
    return msgspec.json.encode(value).decode()


def _triggered(tag: Mapping[str, Any], param: str) -> dict[str, Any]:
    """SGLang's and OpenAI's first structural tags: `structures` with a begin, schema and end each, and
    `triggers`, after which one of them follows."""
    structures, triggers = tag["structures"], tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise field_error(param, "needs lists of 'structures' and 'triggers'")
    tags = []
    for i, one in enumerate(structures):
        if not isinstance(one, dict) or not {"begin", "end"} <= set(one):
            where = f"{param}.structures[{i}]"
            raise field_error(where, "must be an object with 'begin', 'schema' and 'end'")
        schema = {"type": "json_schema", "json_schema": one.get("schema", True)}
        tags.append({"type": "tag", "begin": one["begin"], "content": schema, "end": one["end"]})
    return {
        "type": "structural_tag",
        "format": {"type": "triggered_tags", "triggers": triggers, "tags": tags},
    }
