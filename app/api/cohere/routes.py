"""Cohere's `/v2/chat`, at its own path and at vLLM's. Errors on these paths have their shape
(`app/http/middleware.py`)."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler

from app.api.cohere.events import DIALECT, ReplyFrames, Telling, message
from app.api.cohere.schema import COHERE, NAMES, CohereBody, chat_body
from app.api.openai.chat import chat_job
from app.api.request.field_names import rename_fields
from app.api.request.logprobs import Namer
from app.api.request.sampling import ready
from app.api.vllm.render import rendered
from app.engine.reasoning_budget import Watcher
from app.http.aside import aside
from app.http.body import decoded
from app.http.delivery import Collector, Delivery, running
from app.http.keys import SERVICE
from app.http.reply import json_response
from app.http.sse import EventStream
from app.service import Loaded
from core.errors import RequestError


async def chat(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, after Cohere."""
    body = await decoded(request, COHERE)
    loaded = ready(request.app[SERVICE], body.model)
    try:
        return await _run(request, body, loaded)
    except RequestError as error:
        rename_fields(error, NAMES, ())
        raise


async def _run(request: web.Request, body: CohereBody, loaded: Loaded) -> web.StreamResponse:
    asked = await aside(len(body.messages or ()), lambda: chat_body(body, loaded))
    job, watch = await chat_job(asked, loaded)
    namer = Namer(loaded.tokenizer) if body.logprobs else None
    telling = Telling(id=job.id, reading=watch.reading, namer=namer)
    watcher = Watcher(loaded.engine, loaded.tokenizer, watch)
    if body.stream:
        delivery = Delivery(1)
        async with running(watcher, [job], delivery.take) as runs:
            async with EventStream(request, dialect=DIALECT) as stream:
                await delivery.run(stream, ReplyFrames(telling, runs[0]))
            return stream.response
    collector = Collector(1)
    async with running(watcher, [job], collector.take) as runs:
        (piece,) = await collector.collect()
        return json_response(message(telling, runs[0], piece))


async def render(request: web.Request) -> web.StreamResponse:
    """The prompt of a conversation after Cohere, as text and as tokens."""
    body = await decoded(request, COHERE)
    loaded = ready(request.app[SERVICE], body.model)
    try:
        asked = await aside(len(body.messages or ()), lambda: chat_body(body, loaded))
        job, _ = await chat_job(asked, loaded)
        return json_response(await rendered(job, asked, loaded))
    except RequestError as error:
        rename_fields(error, NAMES, ())
        raise


TABLE: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v2/chat", chat),
    ("POST", "/cohere/v2/chat", chat),
    ("POST", "/cohere/v2/chat/render", render),
)
