"""The constraint of a request in all its spellings: OpenAI's, SGLang's, vLLM's and vLLM's older ones.

What is asked for is put into one form here; whether it can be carried out is the compiler's to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from app.http.body import check_depth
from app.http.schema import Refused
from core.errors import RequestError
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
"""Its options. None can be honoured."""

_UNSET: tuple[object, ...] = (None, False, "", [])

CONSTRAINTS = frozenset({*_PLAIN, "structured_outputs", "response_format"})
"""All the fields."""


class _Asked(NamedTuple):
    """One constraint as it was sent."""

    param: str
    kind: GrammarKind
    value: Any


def constraint_of(body: Refused, inner: Refused | None = None, prefix: str = "") -> GrammarSpec | None:
    """The one constraint of a request, or None. `inner` is a part of the body with the same fields,
    under `prefix`. Raises `RequestError` for two constraints (naming both) and for one that is not of
    its type."""
    asked = _asked(body, "") + (_asked(inner, prefix) if inner is not None else [])
    if not asked:
        return None
    if len(asked) > 1:
        raise RequestError(
            f"'{asked[0].param}' and '{asked[1].param}' cannot both constrain the output: give one.",
            asked[1].param,
        )
    param, kind, value = asked[0]
    return GrammarSpec(kind, _text(kind, value, param), param)


def structured_outputs(spec: GrammarSpec) -> dict[str, object]:
    """The same constraint as the field of that name spells it."""
    for name, kind in _STRUCTURED.items():
        if kind == spec.kind:
            return {name: msgspec.json.decode(spec.text) if kind == "choice" else spec.text}
    return {"json_object": True}


def _asked(body: Refused, prefix: str) -> list[_Asked]:
    return [*_plain(body, prefix), *_structured(body, prefix), *_response_format(body, prefix)]


def _plain(body: Refused, prefix: str) -> Iterator[_Asked]:
    for name, kind in _PLAIN.items():
        if (value := getattr(body, name)) not in _UNSET:
            yield _Asked(prefix + name, kind, value)


def _structured(body: Refused, prefix: str) -> Iterator[_Asked]:
    options = body.structured_outputs
    if options in (*_UNSET, {}):
        return
    param = prefix + "structured_outputs"
    if not isinstance(options, dict):
        raise RequestError(f"'{param}' must be an object.", param)
    for name in _WHITESPACE:
        if options.get(name) not in _UNSET:
            raise RequestError(f"'{param}.{name}' is not supported.", f"{param}.{name}", "unsupported")
    for name, kind in _STRUCTURED.items():
        if options.get(name) not in _UNSET:
            yield _Asked(f"{param}.{name}", kind, options[name])
    if options.get("json_object") not in _UNSET:
        yield _Asked(f"{param}.json_object", "json_object", "")


def _response_format(body: Refused, prefix: str) -> Iterator[_Asked]:
    wanted = body.response_format
    if wanted is None:
        return
    param = prefix + "response_format"
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if not isinstance(kind, str):
        raise RequestError(f"'{param}' must be an object with a 'type'.", param + ".type")
    match kind:
        case "text":
            return
        case "json_object":
            yield _Asked(param, "json_object", "")
        case "json_schema":
            inner = wanted.get("json_schema")
            if not isinstance(inner, dict) or "schema" not in inner:
                where = param + ".json_schema"
                raise RequestError(f"'{where}' must be an object with a 'schema'.", where)
            yield _Asked(param, "json_schema", inner["schema"])
        case "structural_tag":
            yield _Asked(param, "structural_tag", wanted)
        case _:
            raise RequestError(
                f"'{param}' of type '{kind[:40]}' is not supported: use text, json_object, json_schema "
                "or structural_tag.",
                param + ".type",
                "unsupported",
            )


def _text(kind: GrammarKind, value: Any, param: str) -> str:
    """What was sent, as the compiler takes it."""
    match kind:
        case "json_object":
            return ""
        case "regex" | "ebnf":
            if not isinstance(value, str):
                raise RequestError(f"'{param}' must be a string.", param)
            return value
        case "choice":
            if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
                raise RequestError(f"'{param}' must be a list of strings.", param)
    return value if isinstance(value, str) else _json(kind, value, param)


def _json(kind: GrammarKind, value: Any, param: str) -> str:
    if not isinstance(value, dict | bool | list) or (isinstance(value, list) and kind != "choice"):
        raise RequestError(f"'{param}' must be a JSON object, or one as a string.", param)
    check_depth(value, param)
    if kind == "structural_tag" and isinstance(value, dict) and "structures" in value:
        value = _triggered(value, param)
    return msgspec.json.encode(value).decode()


def _triggered(tag: Mapping[str, Any], param: str) -> dict[str, Any]:
    """SGLang's and OpenAI's first structural tags: `structures` with a begin, schema and end each, and
    `triggers`, after which one of them follows."""
    structures, triggers = tag["structures"], tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise RequestError(f"'{param}' needs lists of 'structures' and 'triggers'.", param)
    tags = []
    for i, one in enumerate(structures):
        if not isinstance(one, dict) or not {"begin", "end"} <= set(one):
            where = f"{param}.structures[{i}]"
            raise RequestError(f"'{where}' must be an object with 'begin', 'schema' and 'end'.", where)
        schema = {"type": "json_schema", "json_schema": one.get("schema", True)}
        tags.append({"type": "tag", "begin": one["begin"], "content": schema, "end": one["end"]})
    return {
        "type": "structural_tag",
        "format": {"type": "triggered_tags", "triggers": triggers, "tags": tags},
    }
