"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

import asyncio

from aiohttp import web

from app.api.request.messages import (
    check_messages_async,
    chosen_template,
    generation_prompt,
    template_arguments,
)
from app.api.request.prompts import check_ids, split_ids
from app.api.request.routing import Routes
from app.api.request.sampling import MAX_CHOICES, check_count, current
from app.api.request.schema import DetokenizeBody, TokenizeBody
from app.api.request.tools import check_tools
from app.http.reply import long_response
from app.service import Loaded
from core.errors import RequestError, field_error
from core.types import Ints

ROUTES = Routes()

SLICE = 512
"""Tokens spelled in one turn of the loop: about 0.2 ms."""


@ROUTES.post(
    TokenizeBody,
    "/tokenize",
    "/v1/tokenize",
    example="prompt",
    has="tokens count max_model_len",
    model=current,
)
async def tokenize(request: web.Request, body: TokenizeBody, loaded: Loaded) -> object:
    """A prompt, several, or messages; lists give lists."""
    texts, add_special = await _texts(body, loaded)
    encoded = []
    for text in texts:
        encoded.append(await loaded.tokenizer.encode_async(text, add_special))
        await asyncio.sleep(0)  # short texts are encoded at once: a long list would be one slice
    single = not isinstance(body.prompt, list)
    answer: dict[str, object] = {
        "tokens": encoded[0] if single else encoded,
        "count": len(encoded[0]) if single else [len(ids) for ids in encoded],
        "max_model_len": loaded.card.context_length,
    }
    if body.return_token_strs:
        names = [await _names(ids, loaded) for ids in encoded]
        answer["token_strs"] = names[0] if single else names
    return await long_response(request, answer)


async def _names(ids: Ints, loaded: Loaded) -> list[str]:
    """Each token as the vocabulary spells it, a slice at a time: 9 million of them took 2.5 s of the loop."""
    names: list[str] = []
    for start in range(0, len(ids), SLICE):
        names += map(loaded.tokenizer.token_name, ids[start : start + SLICE].tolist())
        await asyncio.sleep(0)
    return names


async def _texts(body: TokenizeBody, loaded: Loaded) -> tuple[list[str], bool]:
    """The texts to encode, and whether special tokens are to be added."""
    template = chosen_template(body.chat_template, loaded)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("Give exactly one of 'prompt' and 'messages'.", "prompt")
    if body.prompt is not None:
        if body.prompt == []:
            raise field_error("prompt", "must not be empty")
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        # A list is encoded item by item: 4 million in one body kept the loop for 17 s.
        check_count(len(texts), MAX_CHOICES, "items", "prompt")
        return texts, body.add_special_tokens is not False
    add, continued = generation_prompt(body.add_generation_prompt, body.continue_final_message)
    text = await template.render_async(
        await check_messages_async(body.messages),
        tools=body.tools if check_tools(body.tools) else None,
        add_generation_prompt=add,
        continue_final_message=continued,
        **template_arguments(body.chat_template_kwargs),
    )
    return [text], body.add_special_tokens is True


@ROUTES.post(
    DetokenizeBody, "/detokenize", "/v1/detokenize", needed="tokens", has="text prompt", model=current
)
async def detokenize(request: web.Request, body: DetokenizeBody, loaded: Loaded) -> object:
    """Ids to text, under the names of both SGLang (`text`) and vLLM (`prompt`)."""
    tokens = body.tokens
    if tokens is None:
        raise field_error("tokens", "is missing")
    lists, single = split_ids(tokens, "tokens")
    check_count(len(lists), MAX_CHOICES, "items", "tokens")
    for i, ids in enumerate(lists):
        param = "tokens" if single else f"tokens[{i}]"
        if len(ids) > loaded.card.context_length:
            raise field_error(param, "has more ids than the model's context takes")
        check_ids(ids, loaded.card.vocab_size, param)
    skip = body.skip_special_tokens is not False
    texts = []
    for ids in lists:
        texts.append(loaded.tokenizer.decode(ids, skip_special=skip))
        await asyncio.sleep(0)  # a text of the model's context takes about 1 ms; others run between
    text = texts[0] if single else texts
    return {"text": text, "prompt": text}
