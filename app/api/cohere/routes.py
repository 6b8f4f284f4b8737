"""Cohere's `/v2/chat`, at its own path and at vLLM's. Errors on these paths have their shape
(`app/http/middleware.py`)."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from app.api.cohere.events import DIALECT, ReplyFrames, ReplyOptions
from app.api.cohere.schema import COHERE, NAMES, chat_body
from app.api.openai.chat import chat_job
from app.api.request.field_names import fields_named
from app.api.request.logprobs import Namer
from app.api.request.routing import Routes
from app.api.request.sampling import ready
from app.api.vllm.render import rendered
from app.engine.reasoning_budget import watched
from app.http.answer import AnswerSpec, answer
from app.http.aside import aside
from app.http.body import decoded
from app.http.keys import SERVICE
from app.http.reply import json_response

ROUTES = Routes()


@ROUTES.add(
    "POST /v2/chat",
    "POST /cohere/v2/chat",
    body=COHERE,
    needed="messages",
    has="id finish_reason message usage",
    streams=True,
)
async def chat(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, after Cohere."""
    body = await decoded(request, COHERE)
    loaded = ready(request.app[SERVICE], body.model)
    with fields_named(NAMES):
        asked = await aside(len(body.messages or ()), lambda: chat_body(body, loaded))
        job, watch = await chat_job(asked, loaded)
        options = ReplyOptions(id=job.id, namer=Namer(loaded.tokenizer) if body.logprobs else None)
        spec = AnswerSpec(
            engine=watched(loaded.engine, loaded.tokenizer, watch),
            jobs=[job],
            frames=partial(ReplyFrames, options),
            dialect=DIALECT,
        )
        return await answer(request, spec, body.stream is True)


@ROUTES.add("POST /cohere/v2/chat/render", body=COHERE, example="messages", has="request_id token_ids")
async def render(request: web.Request) -> web.StreamResponse:
    """The prompt of a conversation after Cohere, as text and as tokens."""
    body = await decoded(request, COHERE)
    loaded = ready(request.app[SERVICE], body.model)
    with fields_named(NAMES):
        asked = await aside(len(body.messages or ()), lambda: chat_body(body, loaded))
        job, _ = await chat_job(asked, loaded)
        return json_response(await rendered(job, asked, loaded))
