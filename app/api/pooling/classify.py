"""`/v1/classify` after vLLM, and SGLang's `/encode`, which returns vectors or logits as they are."""

from __future__ import annotations

from typing import Any

import numpy as np
from aiohttp import web

from app.api.pooling.common import PoolBody, activated, encode_all, run_pooled, unit
from app.api.pooling.embeddings import VECTORS, EmbeddingBody, check_dimensions, data_list, encoded_inputs
from app.api.request.routing import Routes
from app.api.request.sampling import available
from app.api.request.schema import Int, Text
from app.http.reply import long_response
from app.service import Loaded
from core.errors import RequestError

ROUTES = Routes()


class ClassifyBody(EmbeddingBody, kw_only=True):
    """`/v1/classify`."""

    use_activation: bool | None = None
    activation: bool | None = None


class EncodeBody(PoolBody, kw_only=True):
    """`/encode`."""

    dimensions: Int | None = None
    text: Text | None = None
    input_ids: list[Int | list[Int]] | None = None


@ROUTES.post(
    ClassifyBody, "/v1/classify", "/classify", example="input", has=VECTORS, runs=True, model=available
)
async def classify(request: web.Request, body: ClassifyBody, loaded: Loaded) -> object:
    """The likeliest class of each input and the probabilities of all."""
    return await classify_answer(body, loaded)


async def classify_answer(body: ClassifyBody, loaded: Loaded) -> dict[str, object]:
    """The whole answer. Raises `RequestError` naming the field."""
    loaded.card.check_task("classify")
    spec = loaded.card.pooling
    pooled = await run_pooled(await encoded_inputs(body, loaded), body, "classify", loaded)
    data: list[dict[str, object]] = []
    for i, logits in enumerate(pooled.vectors):
        scores = activated(logits, spec, body.use_activation, body.activation)
        data.append(
            {
                "index": i,
                "label": spec.labels[int(np.argmax(scores))],
                "probs": scores.tolist(),
                "num_classes": len(scores),
            }
        )
    return data_list(pooled, data, loaded)


@ROUTES.post(
    EncodeBody, "/encode", example="text", has="embedding meta_info", lists=True, runs=True, model=available
)
async def encode_native(request: web.Request, body: EncodeBody, loaded: Loaded) -> web.StreamResponse:
    """The vector of each text, or the logits of a classifier, after SGLang."""
    return await long_response(request, await _encoded(body, loaded))


async def _encoded(body: EncodeBody, loaded: Loaded) -> Any:
    check_dimensions(body.dimensions, loaded)
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("Give exactly one of 'text' and 'input_ids'.", "text")
    param, value = ("text", body.text) if body.text is not None else ("input_ids", body.input_ids)
    inputs, single = await encode_all(value, param, body, loaded)
    pooled = await run_pooled(inputs, body, "encode", loaded)
    vectors = await unit(pooled.vectors, loaded.card.pooling, body.dimensions)
    results = [
        {
            "embedding": vector,
            "meta_info": {
                "id": pooled.id if single else f"{pooled.id}-{i}",
                "finish_reason": {"type": "length", "length": 0},
                "prompt_tokens": len(input.ids),
            },
        }
        for i, (vector, input) in enumerate(zip(vectors, inputs, strict=True))
    ]
    return results[0] if single else results
