"""Routes, registered where their handlers are, with what `/openapi.json` says of them."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar, Unpack

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from app.api.request.conditions import on_conditions
from app.api.request.field_names import fields_named
from app.api.request.sampling import ready
from app.http.access import current_usage
from app.http.body import decoded
from app.http.keys import SERVICE
from app.http.reply import json_response
from app.http.tenant import permit
from app.service import Loaded, Service
from core.errors import field_error

B = TypeVar("B", bound=msgspec.Struct)
Schema = dict[str, Any]
Answering = Callable[[web.Request], Awaitable[object]]
"""Answers a request with a response, or with a value that is sent as JSON."""
BodyAnswering = Callable[[web.Request, B, Loaded], Awaitable[object]]
"""Answers a request with a JSON body: it gets the body and the model."""


class Facts(TypedDict, total=False):
    """Facts about a route that its path, docstring and body do not tell. The summary is the docstring's first
    sentence; a path with an `{id}` and a body with a `model` may be answered with 404. Names of fields are
    separated by spaces."""

    body: type[msgspec.Struct]
    """The JSON body."""
    needed: str
    """Fields without which the body is refused. Its Struct has defaults, so that our error names them."""
    optional: bool
    """A missing body counts as an empty object."""
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
    """Content type of the answer, if it is not JSON; with `has`: the one for clients that ask for it."""
    streams: bool
    """The answer is events instead, when `stream` asks for them."""
    lines: bool
    """The answer is lines of JSON instead, unless `stream` is false."""
    runs: bool
    """The route waits in the engine's queue, as all with a body that stream do: 429 when that is full."""
    admin: bool
    """The route changes the server for everybody: 403 for a key of --api-keys-file that may not."""
    errors: tuple[int, ...]
    """Statuses beyond those that follow from the above or that every route may answer."""


def runs(facts: Facts) -> bool:
    """Whether a route runs the model, so that the limits of API keys apply to it."""
    streams = "body" in facts and (facts.get("streams") or facts.get("lines"))
    return bool(streams or facts.get("runs"))


class Route(msgspec.Struct, frozen=True, eq=False):
    """One method of one path, which may have `{names}`, one of them with a pattern."""

    method: str
    path: str
    handler: Handler
    facts: Facts


class Routes(list[Route]):
    """The routes of a module."""

    def add(self, *targets: str, **facts: Unpack[Facts]) -> Callable[[Answering], Handler]:
        """Decorates the handler of one or more targets: `GET /path`."""

        def decorate(handler: Answering) -> Handler:
            admin, generates = facts.get("admin"), runs(facts)

            @functools.wraps(handler)
            async def answered(request: web.Request) -> web.StreamResponse:
                if admin:
                    permit().check_admin()
                if generates:
                    request.app[SERVICE].check()  # a client that waits for the start has used nothing
                    permit().admit()
                answer = await handler(request)
                return answer if isinstance(answer, web.StreamResponse) else json_response(answer)

            for target in targets:
                method, path = target.split()
                self.append(Route(method, path, answered, facts))
            return answered

        return decorate

    def post(
        self,
        kind: type[B],
        *paths: str,
        model: Callable[[Service, str | None, str | None], Loaded] = ready,
        names: Mapping[str, str] | None = None,
        **facts: Unpack[Facts],
    ) -> Callable[[BodyAnswering[B]], Handler]:
        """Decorates the handler of one or more paths that take a body of this `kind`. `model` finds the
        model and the adapter that the body names; `names` are of fields in errors, as `fields_named` takes
        them."""
        facts["body"] = kind
        targets = [f"POST {path}" for path in paths]

        empty, generates = b"{}" if facts.get("optional") else b"", runs(facts)

        def decorate(handler: BodyAnswering[B]) -> Handler:
            @functools.wraps(handler)
            async def received(request: web.Request) -> object:
                sent = await decoded(request, kind, empty)
                if (usage := current_usage()) is not None:
                    usage.ask(sent)
                with fields_named(names or {}):
                    adapter = getattr(sent, "lora_path", None)
                    named = adapter if isinstance(adapter, str) else None  # `/generate` takes one per prompt
                    loaded = model(request.app[SERVICE], getattr(sent, "model", None), named)
                    if usage is not None:
                        usage.served = loaded.card.name
                    if generates:
                        loaded = on_conditions(loaded, request, sent)
                    return await handler(request, sent, loaded)

            return self.add(*targets, **facts)(received)

        return decorate


CHOICES = "id object created model choices"
DELETED = "id object deleted"
LISTED = "object data first_id last_id has_more"
AFTER: Schema = {"type": "string"}
ORDER: Schema = {"type": "string", "enum": ["asc", "desc"]}


def newest_first(query: Mapping[str, str]) -> bool:
    """Whether the query's `order` asks for the newest first, as it does unset. Raises `RequestError`."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise field_error("order", "must be 'asc' or 'desc'")
    return order == "desc"


def page(listed: Sequence[object], ids: Sequence[object], limit: int) -> dict[str, object]:
    """OpenAI's list object: the first `limit` of `listed`, which has one more where there are more."""
    shown = ids[:limit]
    return {
        "object": "list",
        "data": listed[:limit],
        "first_id": shown[0] if shown else None,
        "last_id": shown[-1] if shown else None,
        "has_more": len(listed) > limit,
    }


def limited(most: int) -> Schema:
    """The schema of a `limit` in the query."""
    return {"type": "integer", "minimum": 1, "maximum": most}
