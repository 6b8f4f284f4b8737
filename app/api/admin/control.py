"""Routes that change the running server, under SGLang's and vLLM's names. Off unless started with
`--control-routes`: whoever reaches them can stop all service."""

from __future__ import annotations

import gc
import logging
from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar

import msgspec
from aiohttp import web

from app.engine.operator import Operator, PauseMode
from app.http import middleware
from app.http.body import decoded
from app.http.errors import HttpError
from app.http.keys import SERVE, SERVICE
from app.http.reply import json_response
from core.command import TAGS, Tag
from core.errors import RequestError, Unavailable

T = TypeVar("T")
Act = Callable[[Operator, web.Request], Awaitable[dict[str, object]]]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class PauseBody(msgspec.Struct):
    """`in_place` is SGLang's word for `keep`."""

    mode: Literal["keep", "in_place", "retract", "abort"] | None = None


class TagsBody(msgspec.Struct):
    """What to give back or take again; nothing or null is everything."""

    tags: list[Tag] | None = None


class LoggingBody(msgspec.Struct):
    """What to log from now on. `log_requests`: the line that every answer leaves."""

    log_level: Literal["debug", "info", "warning", "error"] | None = None
    log_requests: bool | None = None


class SlowBody(msgspec.Struct):
    """Seconds between steps, after SGLang; 0 or null: none."""

    forward_sleep_time: float | None = None


class WeightsBody(msgspec.Struct):
    """A checkpoint on the server's disk."""

    model_path: str | None = None


async def _body(request: web.Request, kind: type[T]) -> T:
    """An empty body is an empty object."""
    return await decoded(request, msgspec.json.Decoder(kind), b"{}")


def _route(act: Act) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        operator = request.app[SERVICE].loaded.operator
        if not request.app[SERVE].control_routes:
            raise HttpError(
                403, "This route is off. Start the server with --control-routes.", "control_routes_off"
            )
        if operator is None:
            raise Unavailable("This server has no engine of its own to control.")
        return json_response({"success": True, **await act(operator, request)})

    return handler


async def _pause(operator: Operator, request: web.Request) -> dict[str, object]:
    asked = (await _body(request, PauseBody)).mode or "keep"
    mode: PauseMode = "keep" if asked == "in_place" else asked
    await operator.pause(mode)
    return {"message": "Paused."}


async def _resume(operator: Operator, request: web.Request) -> dict[str, object]:
    await operator.resume()
    return {"message": "Going on."}


async def _slow_down(operator: Operator, request: web.Request) -> dict[str, object]:
    operator.slow_down((await _body(request, SlowBody)).forward_sleep_time or 0.0)
    return {"message": "As asked."}


async def _start_profile(operator: Operator, request: web.Request) -> dict[str, object]:
    await operator.start_profile()
    return {"message": "Recording."}


async def _stop_profile(operator: Operator, request: web.Request) -> dict[str, object]:
    return {"path": str(await operator.stop_profile())}


async def _load_weights(operator: Operator, request: web.Request) -> dict[str, object]:
    path = (await _body(request, WeightsBody)).model_path
    if not path:
        raise RequestError("Give 'model_path', a checkpoint on the server's disk.", "model_path")
    await operator.load_weights(path)
    return {"message": "The weights are exchanged."}


async def _sleep(operator: Operator, request: web.Request) -> dict[str, object]:
    await operator.sleep(await _tags(request))
    return {"asleep": sorted(operator.asleep)}


async def _wake(operator: Operator, request: web.Request) -> dict[str, object]:
    await operator.wake(await _tags(request))
    return {"asleep": sorted(operator.asleep)}


async def _tags(request: web.Request) -> tuple[Tag, ...]:
    named = request.query.getall("tags", [])
    tags = (await _body(request, TagsBody)).tags
    if named:  # vLLM's /wake_up takes them from the query
        if unknown := [tag for tag in named if tag not in TAGS]:
            raise RequestError(f"'tags' takes {', '.join(TAGS)}, not {unknown[0][:100]!r}.", "tags")
        tags = msgspec.convert(named, list[Tag])
    return TAGS if tags is None else tuple(tags)


async def _freeze(operator: Operator, request: web.Request) -> dict[str, object]:
    gc.collect()
    gc.freeze()
    return {"message": "What is alive now is never looked at again by the collector."}


async def _logging(operator: Operator, request: web.Request) -> dict[str, object]:
    body = await _body(request, LoggingBody)
    if body.log_level is not None:
        logging.getLogger().setLevel(body.log_level.upper())
    if body.log_requests is not None:
        # Lines of requests are `info`: they still need that level, or a lower one.
        level = logging.NOTSET if body.log_requests else logging.WARNING
        logging.getLogger(middleware.__name__).setLevel(level)
    return {"message": "As asked."}


async def is_paused(request: web.Request) -> web.StreamResponse:
    """Whether steps are planned."""
    operator = request.app[SERVICE].loaded.operator
    return json_response({"is_paused": operator is not None and operator.paused})


async def is_sleeping(request: web.Request) -> web.StreamResponse:
    """Whether memory is given back."""
    operator = request.app[SERVICE].loaded.operator
    return json_response({"is_sleeping": operator is not None and bool(operator.asleep)})


pause, resume, slow_down = _route(_pause), _route(_resume), _route(_slow_down)
start_profile, stop_profile = _route(_start_profile), _route(_stop_profile)
load_weights = _route(_load_weights)
sleep, wake = _route(_sleep), _route(_wake)
freeze_gc, configure_logging = _route(_freeze), _route(_logging)

TABLE: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/pause_generation", pause),
    ("POST", "/pause", pause),
    ("POST", "/continue_generation", resume),
    ("POST", "/resume", resume),
    ("GET", "/is_paused", is_paused),
    ("POST", "/slow_down", slow_down),
    ("POST", "/start_profile", start_profile),
    ("POST", "/stop_profile", stop_profile),
    ("POST", "/update_weights_from_disk", load_weights),
    ("POST", "/release_memory_occupation", sleep),
    ("POST", "/sleep", sleep),
    ("POST", "/resume_memory_occupation", wake),
    ("POST", "/wake_up", wake),
    ("GET", "/is_sleeping", is_sleeping),
    ("GET", "/freeze_gc", freeze_gc),
    ("POST", "/freeze_gc", freeze_gc),
    ("POST", "/configure_logging", configure_logging),
)
