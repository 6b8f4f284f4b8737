"""vLLM's `derender` routes: they turn tokens generated elsewhere, or by `/inference/v1/generate`, into the
answer of chat or completions."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

import msgspec
from aiohttp import web

from app.api.openai.chat import chat_job
from app.api.openai.chat_stream import message_fields
from app.api.openai.stream import envelope, finish_fields, finished
from app.api.request.logprobs import Entry, Namer, chat_entry
from app.api.request.prompts import check_ids
from app.api.request.routing import CHOICES, Routes
from app.api.request.sampling import MAX_CHOICES
from app.api.request.schema import ChatBody, CompletionBody, Int
from app.engine.job import Piece
from app.parsers.reading import Reading
from app.service import Loaded
from core.errors import field_error, unsupported
from core.types import Finish, FinishReason

ROUTES = Routes()

_NAMED = re.compile(r"token_id:([0-9]{1,9})")

TAIL = 8
"""Tokens of the prompt that the text of the first generated token may depend on."""


class TokenLogprob(msgspec.Struct, kw_only=True):
    """A token and its log-probability. vLLM names it by `token`, as `token_id:17`."""

    token_id: Int = -1
    token: str | None = None
    logprob: float
    top_logprobs: list[TokenLogprob] | None = None

    def __post_init__(self) -> None:
        if self.token_id != -1:
            return
        if (named := _NAMED.fullmatch(self.token or "")) is None:
            raise ValueError("Expected a `token_id`, or a `token` like `token_id:17`")
        self.token_id = int(named[1])


class ChoiceLogprobs(msgspec.Struct, kw_only=True):
    """`logprobs` of a choice."""

    content: list[TokenLogprob] | None = None


class GeneratedChoice(msgspec.Struct, kw_only=True):
    """A choice of `/inference/v1/generate`."""

    index: Int = 0
    token_ids: list[Int] | None = None
    finish_reason: str | None = None
    logprobs: ChoiceLogprobs | None = None


class Generated(msgspec.Struct, kw_only=True):
    """An answer of `/inference/v1/generate`."""

    request_id: str | None = None
    choices: list[GeneratedChoice] | None = None
    prompt_token_ids: list[Int] | None = None


class DerenderChatBody(msgspec.Struct, kw_only=True):
    """`/v1/chat/completions/derender`."""

    model: str | None = None
    generate_response: Generated | None = None
    prompt_tokens: Int | None = None
    prompt_token_ids: list[Int] | None = None
    chat_request: ChatBody | None = None
    stream: bool | None = None


class DerenderBody(msgspec.Struct, kw_only=True):
    """`/v1/completions/derender`."""

    model: str | None = None
    generate_responses: list[Generated] | None = None
    prompt_tokens: list[Int] | None = None
    prompt_token_ids: list[list[Int] | None] | None = None
    completion_request: CompletionBody | None = None
    stream: bool | None = None


@ROUTES.post(DerenderChatBody, "/v1/chat/completions/derender", needed="generate_response", has=CHOICES)
async def derender_chat(request: web.Request, body: DerenderChatBody, loaded: Loaded) -> object:
    """Tokens as the answer of a conversation: text, thinking and calls."""
    made = body.generate_response
    _check(body.stream, [made], "generate_response", loaded)
    assert made is not None
    tail = body.prompt_token_ids or made.prompt_token_ids or []
    reading, skip = Reading(), True
    if body.chat_request is not None:
        job, watch = await chat_job(body.chat_request, loaded)
        reading, skip = watch.reading, job.text.skip_special_tokens
    listed = []
    for choice in made.choices or ():
        piece = _piece(choice, tail, skip, loaded)
        assert piece.finish is not None
        answer = reading.answer()
        message = message_fields(answer.feed(piece.text) + answer.finish(), reading)
        logprobs, ended = _chat_logprobs(choice, loaded), finished(piece.finish, answer.whole)
        listed.append({"index": choice.index, "message": message, "logprobs": logprobs, **ended})
        await asyncio.sleep(0)  # a text of the model's context is a slice of its own
    head = envelope(made.request_id or "chatcmpl-derender", "chat.completion", loaded.card.name)
    prompt_tokens = len(tail) if body.prompt_tokens is None else body.prompt_tokens
    used = _usage([prompt_tokens], [made])
    return {**head, "choices": listed, "usage": used}


@ROUTES.post(DerenderBody, "/v1/completions/derender", needed="generate_responses", has=CHOICES)
async def derender_completions(request: web.Request, body: DerenderBody, loaded: Loaded) -> object:
    """Tokens as the answers of prompts, one generation each."""
    made = body.generate_responses or []
    _check(body.stream, made or [None], "generate_responses", loaded)
    tails, counts = _prompts(body, made)
    completion = body.completion_request
    skip = completion is None or completion.skip_special_tokens is not False
    listed: list[dict[str, object]] = []
    for each, tail in zip(made, tails, strict=True):
        for choice in each.choices or ():
            piece = _piece(choice, tail, skip, loaded)
            assert piece.finish is not None
            item = {"index": len(listed), "text": piece.text, "logprobs": None}
            listed.append({**item, **finish_fields(piece.finish)})
            await asyncio.sleep(0)
    head = envelope(made[0].request_id or "cmpl-derender", "text_completion", loaded.card.name)
    used = _usage(counts, made)
    return {**head, "choices": listed, "usage": used}


def _check(stream: bool | None, made: Sequence[Generated | None], param: str, loaded: Loaded) -> None:
    """Raise `RequestError` for what is missing, too long, or no token of this model."""
    if stream:
        raise unsupported("stream", "the parser's state would travel with every piece")
    choices = [choice for each in made if each is not None for choice in each.choices or ()]
    if not choices:
        raise field_error(param, "must have 'choices'")
    if len(choices) > MAX_CHOICES:
        raise field_error(param, f"has more than {MAX_CHOICES} choices")
    for choice in choices:
        if len(choice.token_ids or ()) > loaded.card.context_length:
            raise field_error(param, "has more tokens than the model's context takes")
        check_ids(_all_ids(choice), loaded.card.vocab_size, param)


def _all_ids(choice: GeneratedChoice) -> list[int]:
    """The tokens of a choice, and those of its log-probabilities."""
    entries = (choice.logprobs.content if choice.logprobs is not None else None) or []
    named = [one.token_id for entry in entries for one in (entry, *(entry.top_logprobs or ()))]
    return (choice.token_ids or []) + named


def _prompts(body: DerenderBody, made: Sequence[Generated]) -> tuple[list[list[int]], Sequence[int]]:
    """The prompts' tokens, where they are sent, and their numbers."""
    given = body.prompt_token_ids or [None] * len(made)
    counts = body.prompt_tokens
    for name, listed in (("prompt_token_ids", given), ("prompt_tokens", counts)):
        if listed is not None and len(listed) != len(made):
            raise field_error(name, "must have one entry for each of 'generate_responses'")
    tails = [ids or each.prompt_token_ids or [] for ids, each in zip(given, made, strict=True)]
    return tails, list(map(len, tails)) if counts is None else counts


def _piece(choice: GeneratedChoice, prompt: Sequence[int], skip: bool, loaded: Loaded) -> Piece:
    """The whole text of a choice. The token that ended it has no text."""
    tokens = list(choice.token_ids or ())
    try:
        finish = Finish(FinishReason(choice.finish_reason or "stop"))
    except ValueError:
        finish = Finish(FinishReason.STOP)
    shown = tokens
    if finish.reason is FinishReason.STOP and tokens[-1:] and tokens[-1] in loaded.tokenizer.eos_ids:
        shown = tokens[:-1]
    tail = [token for token in prompt[-TAIL:] if 0 <= token < loaded.card.vocab_size]
    decode = loaded.tokenizer.decode
    text = decode([*tail, *shown], skip)[len(decode(tail, skip)) :]
    return Piece(text, tokens, None, finish)


def _chat_logprobs(choice: GeneratedChoice, loaded: Loaded) -> dict[str, object] | None:
    if choice.logprobs is None or choice.logprobs.content is None:
        return None
    namer = Namer(loaded.tokenizer)
    content = []
    for one in choice.logprobs.content:
        top = [(other.token_id, other.logprob) for other in one.top_logprobs or ()]
        content.append(chat_entry(Entry(one.token_id, one.logprob, top), namer))
    return {"content": content, "refusal": None}


def _usage(prompts: Sequence[int], made: Sequence[Generated]) -> dict[str, int]:
    generated = sum(len(choice.token_ids or ()) for each in made for choice in each.choices or ())
    read = sum(prompts)
    return {"prompt_tokens": read, "completion_tokens": generated, "total_tokens": read + generated}
