"""How many subschemas llguidance copies where references or branches stand beside other constraints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from gpu.grammar.schema import Json, below, joins, objects, pointed

MOST: Final = 10**6
"""More are not counted."""
MOST_IDS: Final = 100
"""Schemas with an id from which references are resolved: 500 references from 4,000 take 2 s."""
COPY_BYTES: Final = 6_000
"""Memory that one keeps: 10,000 keep 50 to 60 MB."""
COPY_COST: Final = 60
"""Microseconds that one takes: 10,000 take 0.4 to 0.8 s."""

_DEFINITIONS = ("$defs", "definitions")
_BRANCHES = ("anyOf", "oneOf")
_JOINED = ("allOf", *_BRANCHES)


def copies(root: Json) -> int:
    """Subschemas in copies, roughly, at most `MOST`: a reference beside other constraints becomes a copy of
    what it leads to, with all copies in there, and constraints beside branches are copied into each."""
    return min(_Copies(root).count(), MOST)


class _Copies:
    """A node is a subschema's identity, and whether it is followed if it is a reference alone."""

    def __init__(self, root: Json) -> None:
        self._schemas = {id(schema): schema for schema, _ in objects(root)}
        ids = (schema for schema in self._schemas.values() if "$id" in schema or "id" in schema)
        self._bases = [root, *ids]
        self._led: dict[str, list[int]] = {}
        """Identities of what a reference may lead to."""
        self._sizes: dict[tuple[int, bool], int] = {}
        """Subschemas in a node, copies included; 0 while they are counted. The library refuses cycles."""

    def count(self) -> int:
        copying = [
            key
            for key, schema in self._schemas.items()
            if _joins(schema) and (_branches(schema) > 1 or any(_references(schema)))
        ]
        if copying and len(self._bases) > MOST_IDS:
            return MOST
        return sum(map(self._size, copying))

    def _size(self, key: int) -> int:
        first = (key, False)
        ahead = [first]
        while ahead:
            node = ahead[-1]
            parts = [*self._parts(*node)]
            if node not in self._sizes:
                self._sizes[node] = 0
                ahead += (part for part in parts if part not in self._sizes)
                continue
            ahead.pop()
            schema = self._schemas[node[0]]
            booleans = sum(isinstance(child, bool) for child, _ in below(schema, ""))
            size = 1 + booleans + sum(self._sizes[part] for part in parts)
            self._sizes[node] = min(MOST, size * (_branches(schema) if _joins(schema) else 1))
        return self._sizes[first]

    def _parts(self, key: int, followed: bool) -> Iterator[tuple[int, bool]]:
        schema = self._schemas[key]
        inner = {name: found for name, found in schema.items() if name not in _DEFINITIONS}
        yield from ((id(child), False) for child, _ in below(inner, "") if id(child) in self._schemas)
        alone = schema.get("$ref")
        references = [*_references(schema)] if _joins(schema) else [alone] if followed else []
        for reference in references:
            if isinstance(reference, str):
                yield from ((led, True) for led in self._leads(reference))

    def _leads(self, reference: str) -> list[int]:
        if reference not in self._led:
            found = (pointed(base, reference) for base in self._bases) if reference.startswith("#/") else ()
            self._led[reference] = [*{id(each) for each in found if id(each) in self._schemas}]
        return self._led[reference]


def _joins(schema: Mapping[str, Json]) -> bool:
    """Whether a reference or branches stand beside something else; a type is enough."""
    return joins(schema) or ("type" in schema and any(key in schema for key in ("$ref", *_JOINED)))


def _branches(schema: Mapping[str, Json]) -> int:
    listed = (schema.get(key) for key in _BRANCHES)
    return max([1, *(len(each) for each in listed if isinstance(each, list))])


def _references(schema: Mapping[str, Json]) -> Iterator[Json]:
    """References that are followed where `schema` joins constraints: its own, and those of its parts."""
    yield from filter(None, [schema.get("$ref")])
    for key in _JOINED:
        parts = schema.get(key)
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, Mapping) and "$ref" in part:
                yield part["$ref"]
