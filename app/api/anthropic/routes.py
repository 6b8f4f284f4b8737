"""Anthropic's `/v1/messages`. Errors on these paths have their shape (`app/http/middleware.py`)."""

from __future__ import annotations

from functools import partial

import msgspec
from aiohttp import web

from app.api.anthropic.cache import kept
from app.api.anthropic.events import DIALECT, MessageFrames
from app.api.anthropic.input import chat_messages
from app.api.anthropic.schema import NAMES, MessagesBody, chat_body
from app.api.openai.chat import chat_job, chat_spec
from app.api.request.prompts import prompt_ids
from app.api.request.routing import Routes
from app.api.request.sampling import current
from app.engine.job import Job
from app.engine.reasoning_budget import Watch
from app.http.answer import answer
from app.http.aside import aside
from app.ids import random_hex
from app.service import Loaded
from core.errors import ContextExceeded, RequestError, field_error

ROUTES = Routes()


@ROUTES.post(
    MessagesBody, "/v1/messages", needed="messages", names=NAMES, has="id type role content", streams=True
)
async def messages(request: web.Request, body: MessagesBody, loaded: Loaded) -> web.StreamResponse:
    """Answer a conversation, after Anthropic."""
    if body.max_tokens is None:
        raise field_error("max_tokens", "is missing")
    try:
        job, watch = await _job(body, loaded)
        spec = chat_spec(job, watch, loaded, partial(MessageFrames, job, loaded.card), dialect=DIALECT)
        return await answer(request, spec, body.stream is True)
    except ContextExceeded as error:
        raise too_long(error) from error


def too_long(error: ContextExceeded) -> RequestError:
    """The error in Anthropic's words, by which Claude Code knows that it is to sum up its conversation."""
    most = min(error.limit, error.prompt - 1)  # a prompt that fills the context leaves no room for an answer
    return RequestError(f"prompt is too long: {error.prompt} tokens > {most} maximum", "messages", error.code)


@ROUTES.post(
    MessagesBody,
    "/v1/messages/count_tokens",
    example="messages",
    has="input_tokens",
    model=current,
    names=NAMES,
)
async def count_tokens(request: web.Request, body: MessagesBody, loaded: Loaded) -> object:
    """Tokens of the prompt that the same body would be run with."""
    job, _ = await _job(msgspec.structs.replace(body, max_tokens=None), loaded)
    return {"input_tokens": len(await prompt_ids(job, loaded))}


async def _job(body: MessagesBody, loaded: Loaded) -> tuple[Job, Watch]:
    id = f"msg_{random_hex(24)}"
    count = len(body.messages or ())
    chat = await aside(count, lambda: chat_body(body, chat_messages(body), id, loaded))
    if chat.max_completion_tokens == 0:  # which chat has no use for: the prompt fills the cache, no more
        chat.max_completion_tokens = None
    job, watch = await chat_job(chat, loaded)
    if body.max_tokens == 0:
        job = msgspec.structs.replace(job, max_tokens=0)
    assert isinstance(job.prompt, str)
    # Clients ask for the longest answer of Anthropic's models (Claude Code: 32,000 tokens), whatever the
    # model; Anthropic, too, cuts it to the context.
    prompt = job.prompt
    keep = await aside(count, lambda: kept(body, prompt))
    return msgspec.structs.replace(job, keep=keep, cut_to_fit=True), watch
