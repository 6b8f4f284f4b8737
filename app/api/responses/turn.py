"""One request of `/v1/responses`, checked and made ready to run."""

from __future__ import annotations

import time

import msgspec

from app.api.openai.chat import chat_job
from app.api.request.logprobs import Namer
from app.api.request.sampling import stream_interval
from app.api.request.schema import ChatBody
from app.api.responses.disk import Doc, Record, encode_items
from app.api.responses.input import messages, own_items, resolve, shortened
from app.api.responses.schema import (
    THINKING,
    Item,
    ResponsesBody,
    TextFormat,
    chat_body,
    check_body,
    fields_of_responses,
    logprobs_wanted,
)
from app.api.responses.store import Store
from app.engine.job import Generator, Job
from app.engine.reasoning_budget import Watch, watched
from app.http.aside import aside
from app.ids import random_hex
from app.service import Loaded, ModelCard

_encode = msgspec.json.Encoder().encode


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """The job of one request, how to report it, and what to store."""

    id: str
    owner: str
    items: list[Item]
    """The request's own input."""
    stored_input: bytes
    """`items` as they are stored; empty where the response is not stored."""
    kept: bool
    job: Job
    engine: Generator
    """Runs the job, and parses its text."""
    head: Doc
    """The fields of the response that are known from the start."""
    namer: Namer | None
    """Names tokens in log-probabilities; None if they are not requested."""
    keeps_thinking: bool
    """The client takes the thinking with it, to send it back."""
    streamed: bool
    """A client reads the events."""
    every: int
    """Minimum tokens in an event, if it is streamed."""

    def record(self, doc: Doc, events: bytes = b"") -> Record:
        """The response as it is to be stored."""
        return Record(
            id=self.id,
            owner=self.owner,
            status=doc["status"],
            created=doc["created_at"],
            doc=_encode(doc),
            input=self.stored_input,
            previous=doc["previous_response_id"],
            events=events,
        )


async def make_turn(body: ResponsesBody, owner: str, store: Store, loaded: Loaded) -> Turn:
    """Check, fetch what came before, render. Raises `RequestError` with the body's own field names."""
    check_body(body)
    id = f"resp_{random_hex(32)}"
    count = len(body.input) if isinstance(body.input, list) else 1
    own = await aside(count, lambda: own_items(body.input, id))
    items = await resolve(own, owner, store)
    history: list[Item] = []
    if body.previous_response_id:
        history = await store.history(owner, body.previous_response_id)
    created = int(time.time())
    kept = body.store is not False and store.keeps
    turns = [*history, *items]
    with fields_of_responses():
        made = await aside(len(turns), lambda: messages(turns, body.instructions))
        chat = chat_body(body, made, id)
        job, watch = await _job(chat, loaded, body.truncation == "auto")
    stored = await aside(len(items), lambda: encode_items(items)) if kept else b""
    return Turn(
        id=id,
        owner=owner,
        items=items,
        stored_input=stored,
        kept=kept,
        job=msgspec.structs.replace(job, prompt_param="input"),
        engine=watched(loaded.engine, loaded.tokenizer, watch),
        head=_head(body, id, created, kept, loaded.card),
        namer=Namer(loaded.tokenizer) if logprobs_wanted(body) else None,
        keeps_thinking=THINKING in (body.include or ()),
        streamed=body.stream is True,
        every=stream_interval(body),
    )


async def _job(chat: ChatBody, loaded: Loaded, shorten: bool) -> tuple[Job, Watch]:
    """The job that chat makes; with `shorten` the oldest messages are removed until it fits the context."""
    while True:
        job, watch = await chat_job(chat, loaded)
        if not shorten or not isinstance(job.prompt, str):
            return job, watch
        ids = await loaded.tokenizer.encode_async(job.prompt, job.add_special_tokens, "input")
        fits = len(ids) + (job.max_tokens or 1) <= loaded.card.context_length
        shorter = shortened(chat.messages or [])
        if fits or shorter is None:
            return msgspec.structs.replace(job, prompt=ids), watch
        chat = msgspec.structs.replace(chat, messages=shorter)


def _head(body: ResponsesBody, id: str, created: int, kept: bool, card: ModelCard) -> Doc:
    sampling = card.sampling
    effort = body.reasoning.effort if body.reasoning is not None else None
    return {
        "id": id,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": body.background is True,
        "completed_at": None,
        "error": None,
        "frequency_penalty": body.frequency_penalty or 0.0,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": card.name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": body.presence_penalty or 0.0,
        "previous_response_id": body.previous_response_id or None,
        "prompt_cache_key": body.prompt_cache_key,
        "prompt_cache_retention": body.prompt_cache_retention,
        "reasoning": {"effort": effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": kept,
        "temperature": _set(body.temperature, sampling.temperature),
        "text": _text_field(body.text),
        "tool_choice": _set(body.tool_choice, "auto"),
        "tools": [_tool_field(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": _set(body.top_p, sampling.top_p),
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


def _set(value: object, default: object) -> object:
    return default if value is None else value


def _text_field(text: TextFormat | None) -> Doc:
    if text is None:
        return {"format": {"type": "text"}}
    return {"format": text.format or {"type": "text"}, "verbosity": text.verbosity}


_FUNCTION = {"description": None, "parameters": None, "strict": None}
"""Fields that a function tool has in a response, whether the request gave them or not."""


def _tool_field(tool: Item) -> Item:
    return {**_FUNCTION, **tool} if tool.get("type") == "function" and "name" in tool else tool
