"""JSON Schemas before they are compiled: size limits, and keywords a backend would silently ignore.

A keyword that a library ignores gives an output that looks constrained and is not, so the whole schema
is checked first and the request refused with the keyword named. Only real subschema positions count: a
property called "not" is a name, `not` beside `type` is a keyword.

Formats are enforced, or narrowed to a regular subset (`gpu/grammar/formats.py`).
`contentEncoding` and `contentMediaType` are annotations, as the standard has them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec

MAX_DEPTH = 120
"""Containers inside each other. llguidance's own JSON reader stops at 128."""
MAX_PATH = 400
"""Characters of a place that are kept: a name of 250,000 was copied for each subschema below it."""
MAX_NODES = 100_000
"""Values in a schema. The largest of MaskBench's 11,279 has 12,000."""

Json = Any


class Refused(Exception):
    """The constraint is refused. The message is for the client."""


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
"""Keywords that neither backend supports. llguidance reports all but the last, by which a schema could
make it lenient; xgrammar silently drops most of them."""


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


def _children(value: Json, skipped: str | None = None) -> list[Json]:
    if isinstance(value, Mapping):
        return [inner for key, inner in value.items() if key != skipped]
    return value if isinstance(value, list) else []


def values(root: Json, skipped: str | None = None) -> Iterator[Json]:
    """Every value in `root`, itself first; without those of members named `skipped`."""
    ahead = [root]
    while ahead:
        node = ahead.pop()
        yield node
        ahead += _children(node, skipped)


def subschemas(root: Json) -> Iterator[Place]:
    """Yield every subschema once, the root first: those in positions of drafts 4 to 2020-12, then those that
    references lead to. Below an id a reference is resolved from that id's schema and from the root, since
    drafts differ."""
    ahead: list[tuple[Place, Json]] = [(Place(root, "#"), root)]
    led, seen = list[tuple[str, Json]](), set[int]()
    while ahead or led:
        if not ahead:  # last: a place is named by its position, if it has one
            pointer, resource = led.pop()
            found = ((base, pointed(base, pointer)) for base in (resource, root))
            ahead += ((Place(each, pointer[:MAX_PATH]), base) for base, each in found if each is not None)
            continue
        (schema, path), resource = ahead.pop()
        if id(schema) in seen:
            continue
        yield Place(schema, path)
        if isinstance(schema, Mapping):
            seen.add(id(schema))
            resource = schema if any(isinstance(schema.get(key), str) for key in _IDS) else resource
            ahead += ((place, resource) for place in below(schema, path[:MAX_PATH]))
            if isinstance(target := schema.get("$ref"), str) and target.startswith("#/"):
                led.append((target, resource))


def below(schema: Mapping[str, Json], path: str) -> Iterator[Place]:
    """Yield the subschemas that stand directly in `schema`, which is at `path`."""
    for key, found in schema.items():
        if key not in _POSITIONS:
            continue
        if isinstance(found, list) and key not in _IN_MAP:
            yield from (Place(child, f"{path}/{key}/{at}") for at, child in enumerate(found))
        elif key in _IN_MAP and isinstance(found, Mapping):
            yield from (Place(child, f"{path}/{key}/{name[:MAX_PATH]}") for name, child in found.items())
        elif key in _SINGLE and isinstance(found, Mapping | bool):
            yield Place(found, f"{path}/{key}")


def objects(root: Json) -> Iterator[tuple[dict[str, Json], str]]:
    """Every subschema that is an object, with its place."""
    return ((schema, path) for schema, path in subschemas(root) if isinstance(schema, dict))


def pointed(root: Json, pointer: str) -> Json:
    """Resolve a JSON pointer (`#/...`). None if it leads nowhere."""
    node = root
    for part in unquote(pointer[2:]).split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        elif isinstance(node, Mapping):
            node = node.get(name)
        else:
            return None
    return node


class UnsupportedKeyword(NamedTuple):
    """A keyword that no backend supports, and where it is."""

    keyword: str
    schema: Json
    path: str
    why: str = "is not supported"


def check_schema(root: Json) -> None:
    """Raise `Refused` for an unsupported keyword, naming it and its place."""
    for fault in unsupported_keywords(root):
        refuse(fault.keyword, fault.path, fault.why)


def drop_unsupported(root: Json) -> list[str]:
    """Remove unsupported keywords from `root` and return their descriptions. Raises `Refused` for what is
    no schema."""
    dropped = []
    for keyword, schema, path, _ in list(unsupported_keywords(root, _refused_by_llguidance)):
        dropped.append(f"'{keyword}' at {path[:200]}")
        schema.pop(keyword, None)
    return dropped


_NOT_REGULAR = re.compile(r"\(\?<?[=!]|\\[1-9]|\\k<|\\[bB]")
"""Matches look-around, back references and word boundaries in a pattern, which llguidance does not
support."""


def _refused_by_llguidance(schema: Mapping[str, Json]) -> Iterator[str]:
    """Keywords that llguidance itself refuses, also when it is lenient."""
    if isinstance(pattern := schema.get("pattern"), str) and _NOT_REGULAR.search(pattern):
        yield "pattern"
    if isinstance(target := schema.get("$ref"), str) and not target.startswith("#"):
        yield "$ref"
    names = schema.get("patternProperties")
    if isinstance(names, Mapping) and (len(names) > 1 or any(map(_NOT_REGULAR.search, names))):
        yield "patternProperties"


def unsupported_keywords(
    root: Json, more: Callable[[Mapping[str, Json]], Iterable[str]] = lambda schema: ()
) -> Iterator[UnsupportedKeyword]:
    """Unsupported keywords, and those that `more` finds. Raises `Refused` for what is no schema."""
    if not isinstance(root, Mapping | bool):
        raise Refused("The schema must be a JSON object or a boolean.")
    for schema, path in subschemas(root):
        if not isinstance(schema, Mapping | bool):
            raise Refused(f"The schema at {path} must be an object or a boolean.")
        if isinstance(schema, Mapping):
            for key in (*_UNSUPPORTED, *more(schema)):
                if key in schema:
                    yield UnsupportedKeyword(key, schema, path)
            for key in _inexact(schema):
                yield UnsupportedKeyword(
                    key, schema, path, "with a number of more than 53 bits is not supported"
                )
            if schema.get("uniqueItems") not in (None, False):
                yield UnsupportedKeyword("uniqueItems", schema, path)
            if _min_properties_too_large(schema):
                why = "is not supported beyond the number of required properties"
                yield UnsupportedKeyword("minProperties", schema, path, why)
            for key, why in _ambiguous(schema, path):
                yield UnsupportedKeyword(key, schema, path, why)


def _ambiguous(schema: Mapping[str, Json], path: str) -> Iterator[tuple[str, str]]:
    """Keywords by which a reference may lead to another place than it seems, and why they are refused."""
    if path != "#" and "$ref" in schema:
        # Up to draft 7 the id is ignored there, later it changes what the reference means.
        yield from (
            (key, "beside '$ref' is not supported") for key in _IDS if isinstance(schema.get(key), str)
        )
    if isinstance(target := schema.get("$ref"), str) and target.find("#") > 0:
        yield "$ref", "must lead to a place in the schema, as '#/...' does"


_IDS = ("$id", "id")

ANNOTATIONS = frozenset(("$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated"))
ANNOTATIONS |= {"description", "examples", "id", "readOnly", "title", "writeOnly"}
"""Keywords that constrain nothing by themselves."""

_EXACT = 2**53
"""llguidance reads numbers as doubles: integers above this are rounded."""

_LARGEST = 2**63
"""Integers that llguidance writes are below this."""

_BOUNDS = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}


def _inexact(schema: Mapping[str, Json]) -> Iterator[str]:
    """Return the keywords whose numbers llguidance would change, so that the answer could have another
    constant or exceed a bound. A bound that only becomes tighter is accepted."""
    for key in ("const", "enum"):
        if any(_is_large(value) for value in values(schema.get(key))):
            yield key
    for key, sign in _BOUNDS.items():
        bound: Any = schema.get(key)
        if _is_large(bound):
            near = int(float(max(min(bound, 2 * _LARGEST), -2 * _LARGEST)))
            read = max(min(near, _LARGEST - 1), -_LARGEST)
            if (read - bound) * sign < 0 or key.startswith("exclusive"):
                yield key


def _is_large(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) >= _EXACT


def _min_properties_too_large(schema: Mapping[str, Json]) -> bool:
    """An object may repeat a key, which parsers count once: only required properties, and the first member,
    are sure to be distinct."""
    least, required = schema.get("minProperties", 0), schema.get("required")
    sure = max(len(required), 1) if isinstance(required, list) else 1
    return isinstance(least, int | float) and least > sure


def joins(schema: Mapping[str, Json]) -> bool:
    """Whether constraints of several places apply to the value that it describes."""
    parts = schema.get("allOf")
    count = len(parts) if isinstance(parts, list) else 0
    count += sum(key in schema for key in ("$ref", "anyOf", "oneOf"))
    own = schema.keys() - ANNOTATIONS - {"allOf", "$ref", "anyOf", "oneOf", "type"}
    return count > 0 and count + bool(own) > 1


def refuse(keyword: str, path: str, why: str = "is not supported") -> None:
    """Raise `Refused` for a keyword at a place."""
    raise Refused(f"The schema keyword '{keyword}' at {path[:200]} {why}.")
