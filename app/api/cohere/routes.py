"""Cohere's `/v2/chat`, at its own path and at vLLM's. Errors on these paths have their shape
(`app/http/middleware.py`)."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from app.api.cohere.events import DIALECT, ReplyFrames
from app.api.cohere.schema import NAMES, CohereBody, chat_body
from app.api.openai.chat import chat_job, chat_spec
from app.api.request.logprobs import Namer
from app.api.request.routing import Routes
from app.api.vllm.render import rendered
from app.http.answer import answer
from app.http.aside import aside
from app.service import Loaded

ROUTES = Routes()


@ROUTES.post(
    CohereBody,
    "/v2/chat",
    "/cohere/v2/chat",
    needed="messages",
    has="id finish_reason message usage",
    names=NAMES,
    streams=True,
)
async def chat(request: web.Request, body: CohereBody, loaded: Loaded) -> web.StreamResponse:
    """Answer a conversation, after Cohere."""
    chat_request = await aside(len(body.messages or ()), lambda: chat_body(body, loaded))
    job, watch = await chat_job(chat_request, loaded)
    namer = Namer(loaded.tokenizer) if body.logprobs else None
    spec = chat_spec(job, watch, loaded, partial(ReplyFrames, job.id, namer), dialect=DIALECT)
    return await answer(request, spec, body.stream is True)


@ROUTES.post(
    CohereBody, "/cohere/v2/chat/render", example="messages", has="request_id token_ids", names=NAMES
)
async def render(request: web.Request, body: CohereBody, loaded: Loaded) -> object:
    """The prompt of a conversation after Cohere, as text and as tokens."""
    chat_request = await aside(len(body.messages or ()), lambda: chat_body(body, loaded))
    job, _ = await chat_job(chat_request, loaded)
    return await rendered(job, chat_request, loaded)
