"""`/generative_scoring`, after vLLM: how likely the first label is after the query and each item."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any

import msgspec
from aiohttp import web

from app.api.pooling.embeddings import VECTORS
from app.api.pooling.score import ScoreBody, score_answer
from app.api.request.prompts import Prompt, split_prompts
from app.api.request.routing import Routes
from app.api.request.sampling import MAX_CHOICES, job_id, ready
from app.api.request.schema import Int
from app.http.body import decoded
from app.http.keys import SERVICE
from app.http.reply import json_response
from app.service import Loaded
from core.errors import RequestError

ROUTES = Routes()


class GenerativeBody(msgspec.Struct, kw_only=True):
    """`/generative_scoring`. Unset, `apply_softmax` and `add_special_tokens` are true."""

    model: str | None = None
    query: str | list[Int] | None = None
    items: list[str | list[Int]] | None = None
    label_token_ids: list[Int] | None = None
    apply_softmax: bool | None = None
    item_first: bool | None = None
    add_special_tokens: bool | None = None
    priority: Int | None = None
    request_id: str | None = None


GENERATIVE = msgspec.json.Decoder(GenerativeBody)


@ROUTES.add(
    "POST /generative_scoring", body=GENERATIVE, needed="query items label_token_ids", has=VECTORS, runs=True
)
async def generative_scoring(request: web.Request) -> web.StreamResponse:
    """The probability of the first label after the query and each item."""
    body = await decoded(request, GENERATIVE)
    loaded = ready(request.app[SERVICE], body.model)
    id = job_id(body.request_id, secrets.token_hex(16), "request_id")
    answer: Any = await score_answer(await _in_tokens(body, loaded), loaded)
    data = [{"index": i, "object": "score", "score": row[0]} for i, row in enumerate(answer["scores"])]
    head = {"id": f"generative-scoring-{id}", "object": "list", "created": int(time.time())}
    return json_response({**head, "model": answer["model"], "data": data, "usage": answer["usage"]})


async def _in_tokens(body: GenerativeBody, loaded: Loaded) -> ScoreBody:
    """vLLM joins tokens, not texts: query and items are encoded apart."""
    if body.query is None or not body.items:
        name = "query" if body.query is None else "items"
        raise RequestError(f"'{name}' is missing or empty.", name)
    if len(body.items) > MAX_CHOICES:
        raise RequestError(f"'items' takes at most {MAX_CHOICES} items.", "items")
    items: list[str | int | list[int]] = []
    for i, item in enumerate(split_prompts(body.items, "items")[0]):
        items.append(await _ids(item, False, f"items[{i}]", loaded))
        await asyncio.sleep(0)  # short texts are encoded at once: a long list would be one slice
    return ScoreBody(
        query=await _ids(body.query, body.add_special_tokens is not False, "query", loaded),
        items=items,
        label_token_ids=body.label_token_ids,
        apply_softmax=body.apply_softmax is not False,
        item_first=body.item_first,
        priority=body.priority,
    )


async def _ids(text: Prompt, special: bool, param: str, loaded: Loaded) -> list[int]:
    if isinstance(text, list):
        return text
    ids: list[int] = (await loaded.tokenizer.encode_async(text, special, param)).tolist()
    return ids
