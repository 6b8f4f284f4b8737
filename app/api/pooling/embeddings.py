"""`/v1/embeddings` and vLLM's `/pooling`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

from aiohttp import web

from app.api.openai.stream import envelope
from app.api.pooling.common import (
    Input,
    PoolBody,
    Pooled,
    activated,
    base64_of,
    encode,
    encode_all,
    run_pooled,
    unit,
)
from app.api.request.hidden import check_numbers
from app.api.request.messages import check_messages_async, generation_prompt, template_arguments
from app.api.request.routing import Routes
from app.api.request.sampling import available
from app.api.request.schema import Int
from app.http.reply import long_response
from app.service import Loaded
from core.errors import RequestError, field_error, unsupported
from core.types import Floats

ROUTES = Routes()
VECTORS = "id object created model data usage"

FORMATS = ("float", "base64")
_ENCODED = {"embed_dtype": ("float32",), "endianness": ("little", "native")}
"""How vectors are encoded, by vLLM's fields."""


class EmbeddingBody(PoolBody, kw_only=True):
    """`/v1/embeddings`. `input`: a text, texts, token ids or lists of ids; or `messages`."""

    input: str | list[str | Int | list[Int]] | None = None
    messages: list[dict[str, Any]] | None = None
    encoding_format: str | None = None
    dimensions: Int | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    lora_path: str | None = None
    normalize: bool | None = None
    embed_dtype: str | None = None
    endianness: str | None = None


class PoolingBody(EmbeddingBody, kw_only=True):
    """`/pooling`, for any `task` that the model supports."""

    task: Literal["embed", "classify", "score", "token_embed"] | None = None
    use_activation: bool | None = None
    activation: bool | None = None


@ROUTES.post(
    EmbeddingBody, "/v1/embeddings", "/embeddings", example="input", has=VECTORS, runs=True, model=available
)
async def embeddings(request: web.Request, body: EmbeddingBody, loaded: Loaded) -> web.StreamResponse:
    """A vector for each input, pooled as the checkpoint says, or its last hidden state."""
    return await long_response(request, await embeddings_answer(body, loaded))


async def embeddings_answer(body: EmbeddingBody, loaded: Loaded) -> dict[str, object]:
    """The answer, with vectors as numpy arrays. Raises `RequestError` naming the field."""
    loaded.card.check_task("embed", "generate")
    check_format(body, loaded)
    inputs = await encoded_inputs(body, loaded)
    pooled = await run_pooled(inputs, body, "embd", loaded)
    encoded = await encoded_vectors(body, await unit(pooled.vectors, loaded.card.pooling, body.dimensions))
    data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(encoded)]
    return data_list(pooled, data, loaded)


@ROUTES.post(PoolingBody, "/pooling", example="input", has=VECTORS, runs=True, model=available)
async def pooling(request: web.Request, body: PoolingBody, loaded: Loaded) -> web.StreamResponse:
    """For each input a vector, a vector for each token, or scores of classes."""
    card = loaded.card
    task = body.task or ("classify" if card.task == "classify" else "embed")
    check_format(body, loaded)
    inputs = await encoded_inputs(body, loaded)
    if task in ("classify", "score"):
        card.check_task("classify")
        pooled = await run_pooled(inputs, body, "pool", loaded)
        vectors = [
            activated(vector, card.pooling, body.use_activation, body.activation) for vector in pooled.vectors
        ]
    else:
        card.check_task("embed", "generate")
        every = task == "token_embed"
        if every:
            check_numbers(sum(len(input.ids) for input in inputs), loaded, "input")
        pooled = await run_pooled(inputs, body, "pool", loaded, every)
        vectors = await unit(pooled.vectors, card.pooling, body.dimensions)
    encoded = await encoded_vectors(body, vectors)
    data = [{"object": "pooling", "index": i, "data": vector} for i, vector in enumerate(encoded)]
    return await long_response(request, data_list(pooled, data, loaded))


def check_format(body: EmbeddingBody, loaded: Loaded) -> None:
    """Raise `RequestError` for vectors of another kind than they are here."""
    if body.encoding_format not in (None, *FORMATS):
        raise field_error("encoding_format", f"must be one of {', '.join(FORMATS)}")
    for name, known in _ENCODED.items():
        if getattr(body, name) not in (None, *known):
            raise unsupported(name, f"vectors are {known[0]}")
    if body.normalize not in (None, loaded.card.pooling.normalize):
        raise unsupported("normalize", "the checkpoint says whether vectors are")


async def encoded_inputs(body: EmbeddingBody, loaded: Loaded) -> list[Input]:
    """All inputs, checked and tokenized."""
    check_dimensions(body.dimensions, loaded)
    if (body.input is None) == (body.messages is None):
        raise RequestError("Give exactly one of 'input' and 'messages'.", "input")
    if body.messages is not None:
        text = await _rendered(body, loaded)
        return [await encode(text, "messages", body, loaded, body.add_special_tokens is True)]
    add_special = body.add_special_tokens is not False
    return (await encode_all(body.input, "input", body, loaded, add_special))[0]


async def _rendered(body: EmbeddingBody, loaded: Loaded) -> str:
    add, continued = generation_prompt(body.add_generation_prompt is True, body.continue_final_message)
    return await loaded.template.render_async(
        await check_messages_async(body.messages),
        add_generation_prompt=add,
        continue_final_message=continued,
        **template_arguments(body.chat_template_kwargs),
    )


def check_dimensions(dimensions: int | None, loaded: Loaded) -> None:
    """Raise `RequestError` unless a vector can have so many dimensions."""
    if dimensions is not None and not 1 <= dimensions <= loaded.card.hidden_size:
        raise field_error("dimensions", f"must be between 1 and {loaded.card.hidden_size}, got {dimensions}")


async def encoded_vectors(body: EmbeddingBody, vectors: list[Floats]) -> Sequence[object]:
    """Vectors in the requested encoding."""
    if body.encoding_format != "base64":
        return vectors
    encoded = []
    for vector in vectors:
        encoded.append(base64_of(vector))
        await asyncio.sleep(0)  # a long list, or vectors of many tokens, would hold the loop
    return encoded


def data_list(pooled: Pooled, data: list[dict[str, object]], loaded: Loaded) -> dict[str, object]:
    """An answer with a list of vectors or scores."""
    return {**envelope(pooled.id, "list", loaded.card.name), "data": data, "usage": pooled.usage()}
