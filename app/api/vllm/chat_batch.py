"""`/v1/chat/completions/batch`, after vLLM: conversations side by side, one choice each."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from app.api.openai.chat import chat_answer
from app.api.openai.stream import envelope
from app.api.request.field_names import fields_named
from app.api.request.routing import CHOICES, Routes
from app.api.request.sampling import MAX_CHOICES, check_count, request_id
from app.api.request.schema import ChatBody
from app.service import Loaded
from core.errors import field_error, unsupported

ROUTES = Routes()

BatchChatBody = msgspec.defstruct(
    "BatchChatBody",
    [("messages", list[list[dict[str, Any]]] | None, None)],
    bases=(ChatBody,),
    kw_only=True,
    module=__name__,
    namespace={"__doc__": "Chat's fields, and messages of several conversations."},
)

_OF_ONE = ("id", "object", "created", "model", "choices", "usage")


@ROUTES.post(
    BatchChatBody,
    "/v1/chat/completions/batch",
    needed="messages",
    example={"messages": [[{"role": "user", "content": "Hello"}]] * 2, "max_tokens": 16},
    has=CHOICES,
    runs=True,
)
async def chat_batch(request: web.Request, body: Any, loaded: Loaded) -> object:
    """Answer every conversation; one that fails fails all."""
    _check(body)
    id = request_id(body, "chatcmpl")
    tasks: list[asyncio.Future[dict[str, Any]]] = []
    try:
        for i, each in enumerate(body.messages):
            one = msgspec.structs.replace(body, messages=each, rid=f"{id}-{i}")
            tasks.append(asyncio.ensure_future(_one(one, i, loaded)))
            await asyncio.sleep(0)  # a template and an encoding each: 2,000 in one slice were 0.9 s
        answers = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    head = envelope(id, "chat.completion", loaded.card.name)
    used = _total([answer["usage"] for answer in answers])
    choices = [_choice(answer, i) for i, answer in enumerate(answers)]
    return {**head, "choices": choices, "usage": used}


def _check(body: Any) -> None:
    """Raise `RequestError` for fields that this route does not support."""
    if not body.messages:
        raise field_error("messages", "must have at least one conversation")
    check_count(len(body.messages), MAX_CHOICES, "conversations", "messages")
    if body.stream:
        raise field_error("stream", "is not supported here", "unsupported")
    if body.input_ids:
        raise unsupported("input_ids", "it is one prompt")
    if body.n not in (None, 1):
        raise field_error("n", "must be 1: there is one choice for each conversation")


async def _one(body: ChatBody, index: int, loaded: Loaded) -> dict[str, Any]:
    with fields_named({"messages": f"messages[{index}]"}):
        return await chat_answer(body, loaded)


def _choice(answer: dict[str, Any], index: int) -> dict[str, Any]:
    """The choice, with the fields of its whole answer."""
    more = {name: value for name, value in answer.items() if name not in _OF_ONE}
    return {**answer["choices"][0], **more, "index": index}


def _total(values: list[Any]) -> Any:
    """The sum of numbers, or of objects field by field."""
    if isinstance(values[0], dict):
        return {name: _total([each[name] for each in values]) for name in values[0]}
    return sum(values)
