"""Whole answers without a connection: what batches and `app.offline` share with HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import msgspec
import numpy as np

from app.api.openai.chat import chat_answer
from app.api.openai.completions import completion_answer
from app.api.pooling.classify import ClassifyBody, classify_answer
from app.api.pooling.embeddings import EmbeddingBody, embeddings_answer
from app.api.request.sampling import selected
from app.api.request.schema import ChatBody, CompletionBody
from app.batch.work import Answers
from app.http.body import decode
from app.service import Loaded

_BODIES: Mapping[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/embeddings": EmbeddingBody,
    "/v1/classify": ClassifyBody,
}
_ANSWERS: Mapping[type[msgspec.Struct], Callable[[Any, Loaded], Awaitable[dict[str, Any]]]] = {
    ChatBody: chat_answer,
    CompletionBody: completion_answer,
    EmbeddingBody: embeddings_answer,
    ClassifyBody: classify_answer,
}


async def answer(body: Any, loaded: Loaded) -> dict[str, Any]:
    """The answer of the endpoint that takes such a decoded body, with vectors as arrays. `stream` is ignored.
    Raises `core.errors`."""
    if getattr(body, "stream", None):
        body = msgspec.structs.replace(body, stream=None)
    return await _ANSWERS[type(body)](body, selected(loaded, body.model, getattr(body, "lora_path", None)))


async def _answer_json(kind: type[msgspec.Struct], body: bytes, loaded: Loaded) -> dict[str, Any]:
    """The answer to a body that is not decoded yet, with vectors as JSON."""
    found = await answer(await decode(kind, body, loaded.bodies), loaded)
    for each in found.get("data", ()):
        if isinstance(each.get("embedding"), np.ndarray):
            each["embedding"] = msgspec.Raw(msgspec.json.encode(each["embedding"].tolist()))
            await asyncio.sleep(0)  # a long list would be one slice
    return found


ANSWERS: Answers = {url: partial(_answer_json, kind) for url, kind in _BODIES.items()}
"""Functions from body to answer, by endpoint."""
