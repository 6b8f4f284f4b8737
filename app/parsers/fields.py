"""Grammars for arguments that are written one by one instead of as a JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from app.parsers.registry import Fields, Quotes
from app.parsers.typed import Types, listed_values, types_of

Element = dict[str, Any]
"""A format of a structural tag."""

SPACES = 24
"""White space in a row inside JSON, enough for a line break and its indentation: without a bound a model
may generate nothing else."""
MAX_OPTIONAL = 40
"""Arguments of which none is required: the grammar grows with their square."""
MAX_COPIED = 1 << 20
"""Bytes of definitions with all arguments that refer to some: each of them has a copy. 2 MB of definitions
beside 1,000 arguments took 4.6 GB and blocked the event loop for 3 s."""

_WHOLE = (
    *("anyOf", "oneOf", "allOf", "not", "if", "enum", "const", "$ref", "minProperties", "maxProperties"),
    *("patternProperties", "propertyNames", "dependentRequired", "dependentSchemas", "dependencies"),
)
"""Keywords about an object as a whole."""
_NOT_TEXT = frozenset({"array", "boolean", "integer", "null", "number", "object"})
_TRUTH: Mapping[str, tuple[str, ...]] = {"boolean": ("True", "False"), "null": ("None",)}


class Unsupported(Exception):
    """The schema has something that a grammar of this format cannot enforce."""


def json_element(schema: object, lenient: bool = False) -> Element:
    """A value as JSON. What cannot be enforced of a `lenient` schema is left out, with a warning."""
    element = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": SPACES}
    return {**element, "lenient": True} if lenient else element


def const_element(text: str) -> Element:
    """A fixed text."""
    return {"type": "const_string", "value": text}


def joined(kind: Literal["sequence", "or"], elements: list[Element]) -> Element:
    """All of the elements, or any one of them."""
    if not elements:
        return const_element("")
    return elements[0] if len(elements) == 1 else {"type": kind, "elements": elements}


def optional(element: Element) -> Element:
    """The element or nothing."""
    return {"type": "optional", "content": element}


def arguments(schema: Mapping[str, Any], fields: Fields, strict: bool, loose: bool) -> Element:
    """The arguments of one function: those that are required first, then any of the others.

    `loose` enforces their names alone. Raises `Unsupported`; where `strict` also for constraints on
    strings that are written without quotes.
    """
    properties = dict(schema.get("properties", {}))
    if loose:
        properties = {name: {} for name in properties}
    elif found := next(
        (key for key in _WHOLE if key in schema and not _has_no_effect(key, schema[key])), None
    ):
        raise Unsupported(
            f"the keyword '{found}' beside its properties has no grammar in this model's format."
        )
    required = [] if loose else _required(schema, properties)
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    if shared and len(_json(shared)) * sum(map(_refers, properties.values())) > MAX_COPIED:
        raise Unsupported("its definitions are too large for so many arguments that refer to them.")
    writer = _Writer(schema, fields, strict, shared)
    first = [writer.field(name, properties.pop(name)) for name in dict.fromkeys(required)]
    rest = [writer.field(name, value) for name, value in properties.items()]
    return _listed(first, rest, fields.separator)


def _required(schema: Mapping[str, Any], properties: Mapping[str, Any]) -> list[str]:
    """The required ones of `properties`; null stands for none, as Go's clients send it. Raises
    `Unsupported`."""
    required = schema.get("required") or []
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise Unsupported("its 'required' is not a list of names.")
    for name in required:
        if name not in properties:
            raise Unsupported(f"the required {name!r:.60} is not among its properties.")
    return required


def _listed(first: list[Element], rest: list[Element], separator: str) -> Element:
    """All of `first`, any of `rest`, in this order."""
    if first or not separator:
        parts = first
        if separator:
            parts = [part for each in first for part in (const_element(separator), each)][1:]
        return joined("sequence", [*parts, *(_behind(each, separator) for each in rest)])
    if not rest:
        return const_element("")
    if len(rest) > MAX_OPTIONAL:
        raise Unsupported(f"more than {MAX_OPTIONAL} arguments, none of them required.")
    starts = [
        joined("sequence", [each, *(_behind(later, separator) for later in rest[i + 1 :])])
        for i, each in enumerate(rest)
    ]
    return optional(joined("or", starts))


def _behind(field: Element, separator: str) -> Element:
    return optional(joined("sequence", [const_element(separator), field]) if separator else field)


class _Writer(msgspec.Struct, frozen=True):
    """Writes the arguments of one function."""

    root: Mapping[str, Any]
    fields: Fields
    strict: bool
    shared: Mapping[str, Any]
    """Definitions that arguments may refer to."""

    def field(self, name: str, schema: Any) -> Element:
        """One argument."""
        fields = self.fields
        bare = fields.begin.startswith("%s")
        if any(sign in name for sign in '<>"\n') or (bare and not name.isidentifier()):
            raise Unsupported(f"the argument {name!r:.60} cannot be written in this model's format.")
        begin = fields.begin % name
        if fields.quotes is not None:
            after = [const_element(fields.after)] if fields.after else []
            return joined("sequence", [const_element(begin), self._quoted(schema, fields.quotes), *after])
        content, end = self._value(schema)
        if not fields.raw:
            return joined("sequence", [const_element(begin), content])
        tag = {"type": "tag", "begin": begin, "content": content, "end": end + fields.end}
        return joined("sequence", [tag, const_element(fields.after)]) if fields.after else tag

    def _quoted(self, schema: Any, quotes: Quotes) -> Element:
        """A string between marks, or any other value as JSON."""
        types = types_of(schema, self.root)
        (begin, end), (plain, plain_end) = quotes.string, quotes.other

        def other(inner: Any) -> Element:
            element = json_element(inner)
            return {"type": "tag", "begin": plain, "content": element, "end": plain_end} if plain else element

        if types is not None and "string" not in types:
            return other(self._inner(schema))
        if types and (values := listed_values(schema)):
            written = (
                f"{begin}{each}{end}" if isinstance(each, str) else f"{plain}{_json(each)}{plain_end}"
                for each in values
            )
            return joined("or", [const_element(text) for text in written])
        text = {"type": "tag", "begin": begin, "content": self._text(schema, types, end)[0], "end": end}
        others = sorted(_NOT_TEXT if types is None else types & _NOT_TEXT)
        return joined("or", [text, *([other({"type": others})] if others else ())])

    def _value(self, schema: Any) -> tuple[Element, str]:
        """A value's grammar, and the text before its end mark."""
        fields = self.fields
        types = types_of(schema, self.root)
        if not fields.raw:
            if types is not None and types <= _TRUTH.keys() and not set(schema) & {"enum", "const"}:
                words = [const_element(word) for kind in sorted(types) for word in _TRUTH[kind]]
                return joined("or", words), ""
            return json_element(self._inner(schema)), ""
        if types is None or "string" in types:
            return self._text(schema, types, fields.end)
        return json_element(self._inner(schema)), fields.gap

    def _text(self, schema: Any, types: Types, end: str) -> tuple[Element, str]:
        """A value that may be text without quotes, up to `end`."""
        fields = self.fields
        if types and (values := listed_values(schema)):
            texts = (each if isinstance(each, str) else _json(each) for each in values)
            return joined("or", [const_element(text) for text in texts]), fields.gap
        if self.strict and (found := _constraining(schema)):
            raise Unsupported(
                f"'{found}' cannot be enforced: this model writes strings without quotes. Leave '{found}' "
                'out of the parameters, or send the function without "strict": true.'
            )
        return {"type": "any_text", "excludes": [end]}, ""

    def _inner(self, schema: Any) -> Any:
        """A property's schema with the definitions that it may refer to."""
        copied = self.shared and isinstance(schema, Mapping) and _refers(schema)
        return {**schema, **self.shared} if copied else schema


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _refers(schema: Any) -> bool:
    """Whether a schema refers to definitions; one that merely has the keyword in a text counts, too."""
    return '"$ref"' in _json(schema)


def _has_no_effect(keyword: str, value: Any) -> bool:
    """Whether the keyword constrains nothing: zod writes for every record that its names are strings."""
    return keyword == "propertyNames" and value in (True, {}, {"type": "string"})


def _constraining(schema: Any) -> str | None:
    """A keyword of a text's schema that cannot be enforced for text without quotes."""
    if not isinstance(schema, Mapping):
        return None
    branches = schema.get("anyOf", [])
    listed = branches if isinstance(branches, list) else []
    other = next((key for key in schema if key not in ("type", "anyOf")), None)
    return other or next((found for each in listed if (found := _constraining(each))), None)
