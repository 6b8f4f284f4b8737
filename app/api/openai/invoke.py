"""SageMaker's one route for every kind of request."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from app.api.openai.chat import chat
from app.api.openai.completions import completions
from app.api.request.routing import CHOICES, Routes
from app.http.body import decoded
from core.errors import RequestError

ROUTES = Routes()


class InvocationBody(msgspec.Struct, kw_only=True):
    """The two fields that decide the kind; the handler decodes the rest."""

    messages: Any = None
    prompt: Any = None


@ROUTES.add("POST /invocations", body=InvocationBody, example="prompt", has=CHOICES, streams=True)
async def invocations(request: web.Request) -> web.StreamResponse:
    """Chat or completions, by the field that has the prompt."""
    body = await decoded(request, InvocationBody, again=True)
    if body.messages is not None:
        return await chat(request)
    if body.prompt is not None:
        return await completions(request)
    raise RequestError("Give 'messages' or 'prompt'.", "messages")
