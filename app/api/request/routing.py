"""Routes, registered where their handlers are, with what `/openapi.json` says of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypedDict, Unpack

import msgspec
from aiohttp.typedefs import Handler

Schema = dict[str, Any]


class Facts(TypedDict, total=False):
    """What path, docstring and body do not say of a route. The summary is the docstring's first sentence; a
    path with an `{id}` and a body with a `model` may be answered with 404. Names of fields are separated by
    spaces."""

    body: msgspec.json.Decoder[Any]
    needed: str
    """Fields without which the body is refused. Its Struct has defaults, so that our error names them."""
    optional: bool
    """No body is an empty object."""
    example: str | Schema
    """A body that works with every model, or the names of its fields; unset: those that are needed."""
    form: Schema
    """A multipart form instead of JSON."""
    query: Mapping[str, Schema]
    has: str
    """Fields that every answer of status 200 has."""
    lists: bool
    """The answer is a list; with `has`: or an object."""
    string: bool
    """The answer is a JSON string."""
    media: str
    """Content type of the answer, if it is not JSON."""
    streams: bool
    """Events instead, when `stream` asks for them."""
    lines: bool
    """Lines of JSON instead, unless `stream` is false."""
    runs: bool
    """It waits in the engine's queue, as all with a body that stream do: 429 when that is full."""
    errors: tuple[int, ...]
    """Statuses beyond those that follow from the above or that every route may answer."""


class Route(msgspec.Struct, frozen=True, eq=False):
    """One method of one path, which may have `{names}`, one of them with a pattern."""

    method: str
    path: str
    handler: Handler
    facts: Facts


class Routes(list[Route]):
    """The routes of a module."""

    def add(self, *targets: str, **facts: Unpack[Facts]) -> Callable[[Handler], Handler]:
        """Decorates the handler of one or more targets: `GET /path`."""

        def decorate(handler: Handler) -> Handler:
            for target in targets:
                method, path = target.split()
                self.append(Route(method, path, handler, facts))
            return handler

        return decorate


CHOICES = "id object created model choices"
DELETED = "id object deleted"
LISTED = "object data first_id last_id has_more"
AFTER: Schema = {"type": "string"}


def limited(most: int) -> Schema:
    """A `limit` in the query."""
    return {"type": "integer", "minimum": 1, "maximum": most}
