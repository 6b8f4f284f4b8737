"""Whole answers without a connection: what batches and `app.offline` share with HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np

from app.api.openai.chat import chat_answer
from app.api.openai.completions import completion_answer
from app.api.pooling.classify import CLASSIFY, classify_answer
from app.api.pooling.embeddings import EMBEDDING, embeddings_answer
from app.api.request.sampling import check_model
from app.api.request.schema import CHAT, COMPLETION
from app.batch.work import Answers
from app.http.body import decode
from app.service import Loaded


class _Endpoint(NamedTuple):
    decoder: msgspec.json.Decoder[Any]
    answer: Callable[[Any, Loaded], Awaitable[dict[str, Any]]]


_ENDPOINTS = {
    "/v1/chat/completions": _Endpoint(CHAT, chat_answer),
    "/v1/completions": _Endpoint(COMPLETION, completion_answer),
    "/v1/embeddings": _Endpoint(EMBEDDING, embeddings_answer),
    "/v1/classify": _Endpoint(CLASSIFY, classify_answer),
}
_BY_TYPE = {endpoint.decoder.type: endpoint for endpoint in _ENDPOINTS.values()}


async def answer(body: Any, loaded: Loaded) -> dict[str, Any]:
    """What the endpoint of a decoded body answers, with vectors as arrays. `stream` is ignored. Raises
    `core.errors`."""
    check_model(loaded, body.model)
    return await _BY_TYPE[type(body)].answer(body, loaded)


async def _answer_json(endpoint: _Endpoint, body: bytes, loaded: Loaded) -> dict[str, Any]:
    """The same for a body as it comes, vectors as JSON."""
    found = await answer(await decode(endpoint.decoder, body, loaded.bodies), loaded)
    for each in found.get("data", ()):
        if isinstance(each.get("embedding"), np.ndarray):
            each["embedding"] = msgspec.Raw(msgspec.json.encode(each["embedding"].tolist()))
            await asyncio.sleep(0)  # a long list would be one slice
    return found


ANSWERS: Answers = {url: partial(_answer_json, endpoint) for url, endpoint in _ENDPOINTS.items()}
"""By endpoint."""
