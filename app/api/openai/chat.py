"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from app.api.openai.chat_stream import ChatFrames
from app.api.openai.common import base_job, check_stream_fields
from app.api.openai.stream import GenerationRequest
from app.api.request.beam import check_beam
from app.api.request.messages import (
    CALL,
    check_messages_async,
    chosen_template,
    generation_prompt,
    short_ids,
    template_arguments,
    written_calls,
)
from app.api.request.prompts import check_ids
from app.api.request.reasoning import constrained, shown, thinking_budget, unthinking, without_thinking
from app.api.request.routing import CHOICES, Routes
from app.api.request.sampling import choices, request_id, stream_interval
from app.api.request.schema import ChatBody, refuse_unsupported
from app.api.request.tools import Tools, called_in, chosen_tools
from app.engine.job import Job, Run
from app.engine.reasoning_budget import Watch, watched
from app.http.answer import AnswerSpec, answer, whole_answer
from app.http.aside import aside
from app.http.body import check_depth
from app.http.delivery import Frames
from app.http.sse import OPENAI, Dialect
from app.parsers.grammar import Wanted
from app.parsers.reading import Reading
from app.parsers.registry import ToolFamily
from app.service import Loaded
from app.text.request_template import RequestTemplate
from app.text.template import ChatTemplate
from core.errors import field_error
from core.types import Ints

ROUTES = Routes()
T = TypeVar("T")


@ROUTES.post(ChatBody, "/v1/chat/completions", needed="messages", has=CHOICES, streams=True)
async def chat(request: web.Request, body: ChatBody, loaded: Loaded) -> web.StreamResponse:
    """Answer a conversation."""
    return await answer(request, await _spec(body, loaded), body.stream is True)


async def chat_answer(body: ChatBody, loaded: Loaded) -> dict[str, Any]:
    """The whole answer, for batches and `app.offline`."""
    loaded.card.check_task("generate")
    return await whole_answer(await _spec(body, loaded))


async def _spec(body: ChatBody, loaded: Loaded) -> AnswerSpec[dict[str, Any]]:
    job, watch = await chat_job(body, loaded)
    object = "chat.completion.chunk" if body.stream else "chat.completion"
    check_stream_fields(body)
    request = GenerationRequest(body=body, loaded=loaded, jobs=[job], id=job.id, object=object)
    return chat_spec(job, watch, loaded, partial(ChatFrames, request, watch.reading), stream_interval(body))


def chat_spec(
    job: Job,
    watch: Watch,
    loaded: Loaded,
    frames: Callable[[Sequence[Run]], Frames[T]],
    every: int = 1,
    dialect: Dialect = OPENAI,
) -> AnswerSpec[T]:
    """How a job of `chat_job` is run and answered, in any dialect."""
    engine = watched(loaded.engine, loaded.tokenizer, watch)
    return AnswerSpec(engine=engine, jobs=[job], frames=frames, every=every, dialect=dialect)


async def chat_job(body: ChatBody, loaded: Loaded) -> tuple[Job, Watch]:
    """The job with its rendered prompt, and how to parse the answer. Raises `RequestError` for everything
    that can be checked without tokens."""
    budget = thinking_budget(body, loaded)
    refuse_unsupported(body, takes=("use_beam_search", "chat_template", "lora_path"))
    tools = chosen_tools(body)
    job = base_job(
        body,
        loaded,
        id=request_id(body, "chatcmpl"),
        n=choices(body.n),
        max_tokens=_max_tokens(body),
        logprobs=_logprobs_wanted(body),
    )
    family = loaded.tools
    if body.input_ids:
        prompt: str | Ints = check_ids(body.input_ids, loaded.card.vocab_size, "input_ids")
    else:
        template = chosen_template(body.chat_template, loaded)
        prompt = await _render(body, loaded, tools, template)
        family = called_in(family, template.shows_tools, tools.shown)
    if loaded.reasoning is not None and (budget == 0 or unthinking(body, loaded.reasoning)):
        calls = family is not None and family.channels and tools.calls != "none"
        prompt = await without_thinking(prompt, loaded.reasoning, loaded, calls)
    job = msgspec.structs.replace(
        job,
        prompt=prompt,
        prompt_param="input_ids" if body.input_ids else "messages",
        add_special_tokens=body.add_special_tokens is True,  # the template writes its own
    )
    text = shown(prompt, loaded)
    watch = Watch(reading=_reading(body, loaded, tools, family, text), budget=budget or None)
    wanted = Wanted(answer=job.grammar, tools=tools.callable, calls=tools.calls, many=tools.many)
    job, watch = await aside(_schema_count(wanted), lambda: constrained(job, text, wanted, watch))
    check_beam(job)
    return job, watch


def _schema_count(wanted: Wanted) -> int:
    """Items of what an answer may contain, for `aside`: one per `CALL` characters of its schemas. 256 KB take
    0.1 s where each argument has a grammar of its own."""
    size = len(wanted.answer.text) if wanted.answer is not None else 0
    return (size + sum(len(msgspec.json.encode(tool.schema)) for tool in wanted.tools)) // CALL


async def _render(
    body: ChatBody, loaded: Loaded, tools: Tools, template: ChatTemplate | RequestTemplate
) -> str:
    messages = await check_messages_async(body.messages)
    if loaded.tools is not None and loaded.tools.short_ids:
        messages = short_ids(messages)
    if loaded.tools is not None and template.drops_calls:
        messages = written_calls(messages, loaded.tools)
    add, continued = generation_prompt(body.add_generation_prompt, body.continue_final_message)
    check_depth(body.documents, "documents")
    arguments = template_arguments(
        body.chat_template_kwargs, documents=body.documents, reasoning_effort=body.reasoning_effort
    )
    if body.reasoning_effort == "none":
        arguments.setdefault("enable_thinking", False)
    if "enable_thinking" in arguments:  # in templates of Granite and DeepSeek V3.1 it is `thinking`
        arguments.setdefault("thinking", arguments["enable_thinking"])
    return await template.render_async(
        messages, tools=tools.shown, add_generation_prompt=add, continue_final_message=continued, **arguments
    )


def _reading(body: ChatBody, loaded: Loaded, tools: Tools, family: ToolFamily | None, prompt: str) -> Reading:
    reasoning = loaded.reasoning
    return Reading(
        tools=family if tools.calls != "none" else None,
        names=frozenset(tool.name for tool in tools.callable),
        schemas={tool.name: tool.schema for tool in tools.callable},
        reasoning=reasoning,
        inside=reasoning is not None and reasoning.opened(prompt),
        inline=body.separate_reasoning is False,
        silent=body.include_reasoning is False,
        one=not tools.many,
        forced=tools.calls == "required",
    )


def _max_tokens(body: ChatBody) -> int | None:
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    value: int | None = getattr(body, name)
    if value is not None and value < 1:
        raise field_error(name, f"must be at least 1, got {value}")
    return value


def _logprobs_wanted(body: ChatBody) -> int:
    top = body.top_logprobs
    if top is not None and top < 0:
        raise field_error("top_logprobs", "must not be negative")
    if not body.logprobs:
        if top:
            raise field_error("top_logprobs", "needs 'logprobs' to be true")
        return -1
    return top or 0
