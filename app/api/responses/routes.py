"""`/v1/responses`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import msgspec
from aiohttp import web

from app.api.request.prompts import prompt_ids
from app.api.request.routing import AFTER, DELETED, LISTED, ORDER, Routes, limited, newest_first, page
from app.api.request.sampling import current
from app.api.responses.background import DIALECT, RESPONSES, Live
from app.api.responses.disk import Doc, Record, decode_items
from app.api.responses.events import ResponseEvents, ending
from app.api.responses.schema import ResponsesBody
from app.api.responses.store import Store
from app.api.responses.turn import Turn, make_turn
from app.engine.job import Piece, Run
from app.http.answer import AnswerSpec, answer
from app.http.delivery import Frames, running
from app.http.errors import fault
from app.http.sse import EventStream
from app.http.tenant import tenant
from app.service import Loaded
from core.errors import LoomError, RequestError, field_error

ROUTES = Routes()
RESPONSE = "id object status output"

MAX_PAGE = 100
"""Items in one page: OpenAI's."""


class ResponseFrames(Frames[None]):
    """`Frames` of one streamed response. Owner: event loop."""

    def __init__(self, turn: Turn, store: Store, runs: Sequence[Run]) -> None:
        self._events = ResponseEvents(turn, runs[0])
        self._turn = turn
        self._store = store

    def head(self) -> bytes:
        """See `Frames.head`."""
        return b"".join(self._events.begin())

    def delta(self, index: int, piece: Piece) -> bytes | None:
        """See `Frames.delta`. All events of a piece go out in one write."""
        return b"".join(self._events.take(piece)) or None

    def finish(self, index: int, piece: Piece) -> bytes:
        """See `Frames.finish`."""
        assert piece.finish is not None
        return self._ended(self._events.end(piece.finish))

    def failed(self, error: LoomError) -> bytes:
        """See `Frames.failed`."""
        return self._ended(self._events.fail(fault(error)))

    def _ended(self, events: list[bytes]) -> bytes:
        """The response is on its way to the store before the client knows that it is complete, and may
        build on it."""
        if self._turn.kept:
            self._store.put(self._turn.record(self._events.doc))
        return b"".join(events)


@ROUTES.post(ResponsesBody, "/v1/responses", example="input", has=RESPONSE, streams=True)
async def create(request: web.Request, body: ResponsesBody, loaded: Loaded) -> object:
    """Answer at once, as a stream, or later."""
    responses = request.app[RESPONSES]
    turn = await make_turn(body, tenant(), responses.store, loaded)
    if body.background:
        live = await responses.start(turn)
        return await live.follow(request, 0) if body.stream else live.doc
    if not body.stream:
        return await _answer(turn, responses.store)
    spec = AnswerSpec(
        engine=turn.engine,
        jobs=[turn.job],
        frames=partial(ResponseFrames, turn, responses.store),
        every=turn.every,
        dialect=DIALECT,
        prompt_logprobs=False,
    )
    return await answer(request, spec, stream=True)


async def _answer(turn: Turn, store: Store) -> Doc:
    live = Live(turn, lambda _: None)
    async with running(turn.engine, [turn.job], live.take) as runs:
        live.begin(runs[0])
        await live.done.wait()
    if live.error is not None:
        raise live.error
    return {**live.doc, "store": turn.kept and await store.put(turn.record(live.doc))}


@ROUTES.add(
    "GET /v1/responses/{id}",
    has=RESPONSE,
    streams=True,
    query={"stream": {"type": "boolean"}, "starting_after": {"type": "integer", "minimum": 0}},
)
async def retrieve(request: web.Request) -> object:
    """A response as it is now, or with `stream=true` the events of one made in the background after
    number `starting_after`."""
    id, whose = request.match_info["id"], tenant()
    responses = request.app[RESPONSES]
    after = _number(request, "starting_after", -1, 2**31)
    streamed = request.query.get("stream", "").lower() in ("true", "1")
    live = responses.live(whose, id)
    if live is not None:
        if streamed and not live.turn.streamed:
            raise _not_streamed()
        return await live.follow(request, after + 1) if streamed else live.doc
    record = await responses.store.get(whose, id)
    if streamed:
        return await _replay(request, record, after)
    return web.Response(body=record.doc, content_type="application/json")


async def _replay(request: web.Request, record: Record, after: int) -> web.StreamResponse:
    doc: Doc = msgspec.json.decode(record.doc)
    if not record.events and (not doc["background"] or doc["status"] != "failed"):
        raise _not_streamed()
    frames = record.events.split(b"\n\n")[:-1]
    # The events of a response that a restart interrupted are lost: only its last one can be made again.
    left = [frame + b"\n\n" for frame in frames[after + 1 :]] if frames else [ending(doc, after + 1)]
    async with EventStream(request, dialect=DIALECT) as stream:
        for frame in left:
            if stream.congested:
                await stream.drained()
            stream.write(frame)
    return stream.response


def _not_streamed() -> RequestError:
    return RequestError(
        "Only a response created with 'background' and 'stream' can be streamed again.", "stream"
    )


@ROUTES.add(
    "GET /v1/responses/{id}/input_items",
    has=LISTED,
    query={"after": AFTER, "order": ORDER, "limit": limited(MAX_PAGE)},
)
async def input_items(request: web.Request) -> object:
    """The request's own items, newest first unless asked otherwise; those before are with the
    responses before."""
    id, whose = request.match_info["id"], tenant()
    responses = request.app[RESPONSES]
    live = responses.live(whose, id)
    if live is not None:
        items = list(live.turn.items)
    else:
        stored = (await responses.store.get(whose, id)).input
        items = await asyncio.to_thread(decode_items, stored)
    if newest_first(request.query):
        items.reverse()
    if after := request.query.get("after"):
        places = [i for i, item in enumerate(items) if item.get("id") == after]
        if not places:
            raise field_error("after", f"names {after[:100]!r}, which is not here")
        items = items[places[0] + 1 :]
    limit = _number(request, "limit", 20, MAX_PAGE)
    return page(items, [item.get("id") for item in items], max(limit, 1))


def _number(request: web.Request, name: str, default: int, most: int) -> int:
    text = request.query.get(name)
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) <= most):
        raise field_error(name, f"must be a number up to {most}")
    return int(text)


@ROUTES.add("DELETE /v1/responses/{id}", has=DELETED)
async def delete(request: web.Request) -> object:
    """Forget one; one that is being made is ended first."""
    id, whose = request.match_info["id"], tenant()
    await request.app[RESPONSES].delete(whose, id)
    return {"id": id, "object": "response", "deleted": True}


@ROUTES.add("POST /v1/responses/{id}/cancel", has=RESPONSE)
async def cancel(request: web.Request) -> object:
    """End one that is made in the background."""
    return await request.app[RESPONSES].cancel(tenant(), request.match_info["id"])


@ROUTES.post(
    ResponsesBody, "/v1/responses/input_tokens", example="input", has="object input_tokens", model=current
)
async def input_tokens(request: web.Request, body: ResponsesBody, loaded: Loaded) -> object:
    """Tokens of the prompt that the same body would be run with; nothing is run or kept."""
    counted = msgspec.structs.replace(body, background=None, max_output_tokens=None, store=False)
    turn = await make_turn(counted, tenant(), request.app[RESPONSES].store, loaded)
    ids = await prompt_ids(turn.job, loaded)
    return {"object": "response.input_tokens", "input_tokens": len(ids)}
