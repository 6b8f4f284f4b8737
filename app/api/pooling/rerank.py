"""`/rerank` after Cohere and Jina, and the scores of pairs of texts after vLLM.

A cross-encoder takes query and document together; an embedding model's vectors are compared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from app.api.pooling.common import Input, PoolBody, Pooled, activated, cut, encode, fitting, run_pooled, unit
from app.api.pooling.embeddings import data_list
from app.api.request.routing import Routes
from app.api.request.sampling import MAX_CHOICES, available, check_count
from app.api.request.schema import Int, Text
from app.service import Loaded
from core.errors import RequestError, field_error

ROUTES = Routes()


class Document(msgspec.Struct):
    """A document as an object."""

    text: str


class RerankBody(PoolBody, kw_only=True):
    """`documents`: texts, or objects with a `text`."""

    query: str | None = None
    documents: list[str | Document] | None = None
    top_n: Int | None = None
    return_documents: bool | None = None
    instruction: str | None = None
    instruct: str | None = None
    max_tokens_per_doc: Int | None = None
    use_activation: bool | None = None
    activation: bool | None = None


class PairBody(PoolBody, kw_only=True):
    """vLLM's forms of `/score`: one text and many, or equally many on both sides."""

    text_1: Text | None = None
    text_2: Text | None = None
    data_1: Any = None
    data_2: Any = None
    queries: Any = None
    documents: Any = None
    use_activation: bool | None = None
    activation: bool | None = None


SIDES = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"))


class Pair(msgspec.Struct, frozen=True):
    """Two texts and the fields that errors name."""

    texts: tuple[str, str]
    params: tuple[str, str]


@ROUTES.post(
    RerankBody,
    "/v1/rerank",
    "/rerank",
    "/v2/rerank",
    needed="query documents",
    has="id model results usage",
    runs=True,
    model=available,
)
async def rerank(request: web.Request, body: RerankBody, loaded: Loaded) -> object:
    """Documents by relevance to the query, best first."""
    check_ranks(loaded)
    pairs = _pairs(body)
    scores, pooled = await scored(pairs, body, loaded, body.max_tokens_per_doc)
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    results = []
    for i in order[: body.top_n]:
        result: dict[str, object] = {"index": i, "relevance_score": scores[i]}
        if body.return_documents is not False:
            result["document"] = {"text": pairs[i].texts[1]}
        results.append(result)
    return {"id": pooled.id, "model": loaded.card.name, "results": results, "usage": pooled.usage()}


async def score_pairs(body: PairBody, loaded: Loaded) -> dict[str, object]:
    """The answer to vLLM's `/score`: one score for each pair."""
    check_ranks(loaded)
    scores, pooled = await scored(_sides(body), body, loaded)
    data: list[dict[str, object]] = [
        {"object": "score", "index": i, "score": value} for i, value in enumerate(scores)
    ]
    return data_list(pooled, data, loaded)


def check_ranks(loaded: Loaded) -> None:
    """Raise `RequestError` for a model that cannot score texts."""
    card = loaded.card
    if card.task == "generate":
        raise RequestError(
            "This model generates text. Ranking needs a cross-encoder (a checkpoint for sequence "
            "classification with one class) or a model for embeddings; for a model that answers yes or no, "
            "send /v1/score with 'query', 'items' and the 'label_token_ids' of the two.",
            "model",
            "unsupported_model",
        )
    if card.task == "classify" and len(card.pooling.labels) != 1:
        raise RequestError(
            f"Ranking needs a head with one class; this model's has {len(card.pooling.labels)}: "
            "use /v1/classify.",
            "model",
            "unsupported_model",
        )


async def scored(
    pairs: Sequence[Pair], body: RerankBody | PairBody, loaded: Loaded, most: int | None = None
) -> tuple[list[float], Pooled]:
    """A score for each pair. `most`: maximum tokens of the second text."""
    if most is not None and most < 1:
        raise field_error("max_tokens_per_doc", "must be at least 1")
    spec = loaded.card.pooling
    if loaded.card.task == "classify":
        inputs = [await _joined(pair, body, loaded, most) for pair in pairs]
        pooled = await run_pooled(inputs, body, "rerank", loaded)
        heads = [activated(each, spec, body.use_activation, body.activation) for each in pooled.vectors]
        return [float(head[0]) for head in heads], pooled
    inputs, places = await _apart(pairs, body, loaded, most)
    pooled = await run_pooled(inputs, body, "rerank", loaded)
    vectors = await unit(pooled.vectors, msgspec.structs.replace(spec, normalize=True))
    return [float(np.dot(vectors[one], vectors[two])) for one, two in places], pooled


async def _joined(pair: Pair, body: PoolBody, loaded: Loaded, most: int | None) -> Input:
    """A pair as one input."""
    ids, second, segments = await loaded.tokenizer.encode_pair_async(pair.texts, pair.params)
    await asyncio.sleep(0)  # short texts do not suspend: a long list would hold the loop
    ids = np.append(ids, np.array(loaded.tokenizer.added_eos, np.int32))
    if most is not None:
        special = loaded.tokenizer.special_ids
        ends = sum(id in special for id in ids[-1:].tolist())
        ids = cut(ids, second + most + ends, special)
    second = min(second, len(ids) - 1) if segments else 0
    return fitting(Input(ids, pair.params[1], second), body, loaded)


async def _apart(
    pairs: Sequence[Pair], body: PoolBody, loaded: Loaded, most: int | None
) -> tuple[list[Input], list[tuple[int, int]]]:
    """Each distinct text once, and for each pair the indices of its two texts."""
    inputs: list[Input] = []
    known: dict[tuple[str, int | None], int] = {}
    places = []
    for pair in pairs:
        ends = []
        for side, (text, param) in enumerate(zip(pair.texts, pair.params, strict=True)):
            limit = most if side else None
            if (text, limit) not in known:
                known[text, limit] = len(inputs)
                inputs.append(await encode(text, param, body, loaded, most=limit))
            ends.append(known[text, limit])
        places.append((ends[0], ends[1]))
    return inputs, places


def _pairs(body: RerankBody) -> list[Pair]:
    if not body.query:
        raise field_error("query", "is missing or empty")
    if not body.documents:
        raise field_error("documents", "is missing or empty")
    check_count(len(body.documents), MAX_CHOICES, "texts", "documents")
    if body.top_n is not None and body.top_n < 1:
        raise field_error("top_n", "must be at least 1")
    instruction = body.instruction or body.instruct
    query = f"{instruction}\n{body.query}" if instruction else body.query
    texts = [document if isinstance(document, str) else document.text for document in body.documents]
    for i, text in enumerate(texts):
        if not text:
            raise field_error(f"documents[{i}]", "must not be empty")
    return [Pair((query, text), ("query", f"documents[{i}]")) for i, text in enumerate(texts)]


def _sides(body: PairBody) -> list[Pair]:
    for names in SIDES:
        if any(getattr(body, name) is not None for name in names):
            break
    else:
        raise RequestError("Give 'text_1' and 'text_2', or 'queries' and 'documents'.", "text_1")
    one, two = (_texts(getattr(body, name), name) for name in names)
    if len(one) not in (1, len(two)):
        raise field_error(names[0], f"has {len(one)} texts and '{names[1]}' has {len(two)}: one, or as many")
    return [
        Pair(
            (one[i % len(one)], text),
            (names[0] if len(one) == 1 else f"{names[0]}[{i}]", f"{names[1]}[{i}]"),
        )
        for i, text in enumerate(two)
    ]


def _texts(value: object, param: str) -> list[str]:
    listed = value if isinstance(value, list) else [value]
    texts = [text for text in listed if isinstance(text, str) and text]
    if not listed or len(texts) < len(listed):
        raise field_error(param, "must be a text or a list of texts, none of them empty")
    check_count(len(texts), MAX_CHOICES, "texts", param)
    return texts
