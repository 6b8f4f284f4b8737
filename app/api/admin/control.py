"""Routes that control the running server, under SGLang's and vLLM's names. Off without `--control-routes`:
any client of them can stop the service."""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Awaitable, Callable
from typing import Literal, Unpack

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from app.api.request.routing import Facts, Routes, Schema
from app.engine.operator import Operator, PauseMode
from app.http import middleware
from app.http.body import decoded
from app.http.errors import HttpError
from app.http.keys import SERVE, SERVICE
from core.command import TAGS, Tag
from core.errors import RequestError, field_error

Answer = dict[str, object]
Act = Callable[[Operator, web.Request], Awaitable[Answer]]

ROUTES = Routes()
LEVELS = ("1", "2")
"""vLLM's levels of sleep: whether weights are kept on the host. Here they are loaded again either way."""
TAGS_QUERY: Schema = {"tags": {"type": "array", "items": {"type": "string", "enum": list(TAGS)}}}


class PauseBody(msgspec.Struct):
    """`in_place` is SGLang's name for `keep`."""

    mode: Literal["keep", "in_place", "retract", "abort"] | None = None


class TagsBody(msgspec.Struct):
    """What to release or allocate; none or null: everything."""

    tags: list[Tag] | None = None


class LoggingBody(msgspec.Struct):
    """What to log from now on. `log_requests`: the line for every answer."""

    log_level: Literal["debug", "info", "warning", "error"] | None = None
    log_requests: bool | None = None


class SlowBody(msgspec.Struct):
    """Seconds between steps, after SGLang; 0 or null: none."""

    forward_sleep_time: float | None = None


class WeightsBody(msgspec.Struct):
    """A checkpoint on the server's disk."""

    model_path: str | None = None


def _route(*targets: str, **facts: Unpack[Facts]) -> Callable[[Act], Handler]:
    """A control route: 403 unless they are on. A missing body counts as an empty object."""
    facts |= {"optional": True, "has": "success", "admin": True}

    def decorate(act: Act) -> Handler:
        @functools.wraps(act)
        async def handler(request: web.Request) -> object:
            operator = request.app[SERVICE].loaded.operator
            if not request.app[SERVE].control_routes:
                raise HttpError(
                    403, "This route is off. Start the server with --control-routes.", "control_routes_off"
                )
            return {"success": True, **await act(operator, request)}

        return ROUTES.add(*targets, **facts)(handler)

    return decorate


@_route("POST /pause_generation", "POST /pause", body=PauseBody)
async def pause(operator: Operator, request: web.Request) -> Answer:
    """Stop planning steps."""
    sent = (await decoded(request, PauseBody, b"{}")).mode or "keep"
    mode: PauseMode = "keep" if sent == "in_place" else sent
    await operator.pause(mode)
    return {"message": "Paused."}


@_route("POST /continue_generation", "POST /resume")
async def resume(operator: Operator, request: web.Request) -> Answer:
    """Continue planning steps."""
    await operator.resume()
    return {"message": "Resumed."}


@_route("POST /slow_down", body=SlowBody)
async def slow_down(operator: Operator, request: web.Request) -> Answer:
    """Leave time between steps."""
    operator.slow_down((await decoded(request, SlowBody, b"{}")).forward_sleep_time or 0.0)
    return {"message": "Done."}


@_route("POST /start_profile")
async def start_profile(operator: Operator, request: web.Request) -> Answer:
    """Record what the device does."""
    await operator.start_profile()
    return {"message": "Recording."}


@_route("POST /stop_profile")
async def stop_profile(operator: Operator, request: web.Request) -> Answer:
    """Write what was recorded to the server's disk."""
    return {"path": str(await operator.stop_profile())}


@_route("POST /update_weights_from_disk", body=WeightsBody)
async def load_weights(operator: Operator, request: web.Request) -> Answer:
    """Replace the weights."""
    path = (await decoded(request, WeightsBody, b"{}")).model_path
    if not path:
        raise RequestError("Give 'model_path', a checkpoint on the server's disk.", "model_path")
    await operator.load_weights(path)
    return {"message": "The weights were replaced."}


@_route(
    "POST /release_memory_occupation",
    "POST /sleep",
    body=TagsBody,
    query=TAGS_QUERY | {"level": {"type": "string", "enum": list(LEVELS)}},
)
async def sleep(operator: Operator, request: web.Request) -> Answer:
    """Release memory."""
    if request.query.get("level", LEVELS[0]) not in LEVELS:
        raise field_error("level", f"must be one of {', '.join(LEVELS)}, whose effect is the same")
    await operator.sleep(await _tags(request))
    return {"asleep": sorted(operator.asleep)}


@_route("POST /resume_memory_occupation", "POST /wake_up", body=TagsBody, query=TAGS_QUERY)
async def wake(operator: Operator, request: web.Request) -> Answer:
    """Allocate released memory again."""
    await operator.wake(await _tags(request))
    return {"asleep": sorted(operator.asleep)}


async def _tags(request: web.Request) -> tuple[Tag, ...]:
    named = request.query.getall("tags", [])
    tags = (await decoded(request, TagsBody, b"{}")).tags
    if named:  # vLLM's /wake_up takes them from the query
        if unknown := [tag for tag in named if tag not in TAGS]:
            raise field_error("tags", f"takes {', '.join(TAGS)}, not {unknown[0][:100]!r}")
        tags = msgspec.convert(named, list[Tag])
    return TAGS if tags is None else tuple(tags)


@_route("GET /freeze_gc", "POST /freeze_gc")
async def freeze_gc(operator: Operator, request: web.Request) -> Answer:
    """Exempt existing objects from garbage collection."""
    gc.collect()
    gc.freeze()
    return {"message": "Existing objects are exempt from garbage collection."}


@_route("POST /configure_logging", body=LoggingBody)
async def configure_logging(operator: Operator, request: web.Request) -> Answer:
    """Change what is logged."""
    body = await decoded(request, LoggingBody, b"{}")
    if body.log_level is not None:
        logging.getLogger().setLevel(body.log_level.upper())
    if body.log_requests is not None:
        # Lines of requests have the level `info`, which `log_level` must allow too.
        middleware.log_requests(body.log_requests)
    return {"message": "Done."}


@ROUTES.add("GET /is_paused", has="is_paused")
async def is_paused(request: web.Request) -> object:
    """Whether the engine is paused."""
    return {"is_paused": request.app[SERVICE].loaded.operator.paused}


@ROUTES.add("GET /is_sleeping", has="is_sleeping")
async def is_sleeping(request: web.Request) -> object:
    """Whether memory is released."""
    return {"is_sleeping": bool(request.app[SERVICE].loaded.operator.asleep)}
