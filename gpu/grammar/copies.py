"""How many subschemas llguidance copies where references or branches stand beside other constraints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Final, NamedTuple

from gpu.grammar.schema import Json, below, joins, objects, pointed

MOST: Final = 10**6
"""More are not counted."""
MOST_IDS: Final = 100
"""Schemas with an id from which references are resolved: 500 references from 4,000 take 2 s."""
COPY_BYTES: Final = 6_000
"""Bytes that one copy keeps: 10,000 keep 50 to 60 MB."""
COPY_COST: Final = 60
"""Microseconds that one copy takes: 10,000 take 0.4 to 0.8 s."""

_BRANCHES = ("anyOf", "oneOf")
_JOINED = ("allOf", *_BRANCHES)
_APART = ("$defs", "definitions", *_JOINED)
"""Keywords whose subschemas are not copied with the schema around them, or are joined with it."""

Node = tuple[int, bool]


def copies(root: Json) -> int:
    """Subschemas in copies, roughly, at most `MOST`: a reference beside other constraints becomes a copy of
    what it leads to, with all copies in there. Constraints beside branches are copied into each, and of
    several lists of branches each becomes a copy beside each of the others."""
    return min(_Copies(root).count(), MOST)


class _Size(NamedTuple):
    """How many branches a subschema becomes where others are joined with it, and how many subschemas these
    have together."""

    ways: int
    subschemas: int


_UNKNOWN = _Size(1, 0)


class _Copies:
    """A node is a subschema's identity, and whether it is followed if it is a reference alone."""

    def __init__(self, root: Json) -> None:
        self._schemas = {id(schema): schema for schema, _ in objects(root)}
        ids = (schema for schema in self._schemas.values() if "$id" in schema or "id" in schema)
        self._bases = [root, *ids]
        self._led: dict[str, list[int]] = {}
        """Identities of what a reference may lead to."""
        self._sizes: dict[Node, _Size] = {}
        """Sizes of nodes, copies included; `_UNKNOWN` while one is counted. The library refuses cycles."""
        self._done = set[Node]()

    def count(self) -> int:
        joint = [key for key, schema in self._schemas.items() if _joins(schema)]
        if joint and len(self._bases) > MOST_IDS and any("$ref" in each for each in self._schemas.values()):
            return MOST
        found = ((self._size(key), any(_references(self._schemas[key]))) for key in joint)
        return sum(size.subschemas for size, leads in found if leads or size.ways > 1)

    def _size(self, key: int) -> _Size:
        first = (key, False)
        ahead = [first]
        while ahead:
            node = ahead[-1]
            if node not in self._sizes:
                self._sizes[node] = _UNKNOWN
                own, lists = self._parts(*node)
                ahead += (part for part in (*own, *chain(*lists)) if part not in self._sizes)
                continue
            ahead.pop()
            if node not in self._done:
                self._done.add(node)
                self._sizes[node] = self._counted(node)
        return self._sizes[first]

    def _counted(self, node: Node) -> _Size:
        own, lists = self._parts(*node)
        booleans = sum(isinstance(child, bool) for child, _ in below(self._schemas[node[0]], ""))
        ways, total = 1, 1 + booleans + sum(self._sizes[part].subschemas for part in own)
        for branches in lists:
            sizes = [self._sizes[part] for part in branches]
            more, size = sum(each.ways for each in sizes), sum(each.subschemas for each in sizes)
            ways, total = min(MOST, ways * more), min(MOST, total * more + size * ways)
        return _Size(ways, min(MOST, total))

    def _parts(self, key: int, followed: bool) -> tuple[list[Node], list[list[Node]]]:
        """Return the nodes below a subschema that nothing is joined with, and lists of nodes: one of
        each list is joined with the subschema."""
        schema = self._schemas[key]
        apart = {name: found for name, found in schema.items() if name not in _APART}
        own = [(id(child), False) for child, _ in below(apart, "") if id(child) in self._schemas]
        followed = followed or _joins(schema)
        lists = [[(id(part), followed)] for part in self._listed(schema, "allOf")]
        lists += ([(id(part), followed) for part in self._listed(schema, name)] for name in _BRANCHES)
        if followed and isinstance(reference := schema.get("$ref"), str):
            lists.append([(led, True) for led in self._leads(reference)])
        return own, [each for each in lists if each]

    def _listed(self, schema: Mapping[str, Json], name: str) -> list[Json]:
        parts = schema.get(name)
        return [part for part in parts if id(part) in self._schemas] if isinstance(parts, list) else []

    def _leads(self, reference: str) -> list[int]:
        if reference not in self._led:
            found = (pointed(base, reference) for base in self._bases) if reference.startswith("#/") else ()
            self._led[reference] = [*{id(each) for each in found if id(each) in self._schemas}]
        return self._led[reference]


def _joins(schema: Mapping[str, Json]) -> bool:
    """Whether a reference or branches stand beside something else; a type is enough."""
    return joins(schema) or ("type" in schema and any(key in schema for key in ("$ref", *_JOINED)))


def _references(schema: Mapping[str, Json]) -> Iterator[Json]:
    """References that are followed where `schema` joins constraints: its own, and those of its parts."""
    yield from filter(None, [schema.get("$ref")])
    for key in _JOINED:
        parts = schema.get(key)
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, Mapping) and "$ref" in part:
                yield part["$ref"]
