"""`/v1/chat/completions`."""

from __future__ import annotations

import msgspec
from aiohttp import web

from app.api.openai.chat_stream import AnswerChunks, read_message
from app.api.openai.common import (
    envelope,
    options,
    prompt_logprobs_wanted,
    request_id,
    routed_chunk,
    spelling,
    stream_chunks,
    with_extras,
)
from app.api.openai.stream import Envelope, Options, finish_fields, usage
from app.api.request.beam import beam_options, check_beam
from app.api.request.constraint import constraint_of
from app.api.request.experts import check_experts, experts_wanted
from app.api.request.hidden import check_states, with_last_states
from app.api.request.logprobs import Namer, chat_logprobs, vllm_prompt_logprobs
from app.api.request.messages import (
    check_messages,
    chosen_template,
    generation_prompt,
    short_ids,
    template_arguments,
)
from app.api.request.prompts import check_ids
from app.api.request.reasoning import constrained, shown, thinking_budget, unthinking
from app.api.request.sampling import (
    allowed_ids,
    bad_words,
    choices,
    keep,
    priority,
    ready,
    root_key,
    sampling_params,
    stream_interval,
    text_options,
    truncation,
)
from app.api.request.schema import CHAT, ChatBody, refuse_unsupported
from app.api.request.tools import Tools, called_in, chosen_tools
from app.engine.job import Job, Piece, Run
from app.engine.reasoning_budget import Watch, WatchedRun, Watcher
from app.http.aside import aside
from app.http.body import decoded
from app.http.delivery import Collector, Delivery, prompt_weight, running, spaced
from app.http.keys import SERVICE
from app.http.reply import long_response
from app.http.sse import EventStream
from app.parsers.grammar import Wanted
from app.parsers.reading import Reading
from app.parsers.registry import ToolFamily
from app.service import Loaded
from app.text.sent import SentTemplate
from app.text.template import ChatTemplate
from core.errors import RequestError
from core.types import Ints


class ChatShape:
    """Chat's part of a chunk: a delta, the role in the first one."""

    __slots__ = ("_body", "_namer", "_prompt", "_run")

    open_first = b'"delta":{"role":"assistant","content":'
    open_next = b'"delta":{"content":'
    close = b"}"
    empty = b'"delta":{}'

    def __init__(self, body: ChatBody, namer: Namer, run: Run, prompt: str | Ints) -> None:
        self._body = body
        self._prompt = prompt
        self._namer = namer
        self._run = run

    def first_text(self, index: int) -> str:
        """What the client had begun, if it wants that told again."""
        return _echo(self._body)

    def first_chunk(self) -> dict[str, object]:
        """What a client wants to know of the prompt."""
        return prompt_extras(self._body, self._run, self._namer, self._prompt)

    def first_extra(self, index: int) -> dict[str, object]:
        """Nothing: the prompt is every choice's."""
        return {}

    def logprobs(self, index: int, piece: Piece) -> object:
        """Of the piece's tokens."""
        return chat_logprobs(piece, self._namer)


async def chat(request: web.Request) -> web.StreamResponse:
    """Render, run, answer."""
    body = await decoded(request, CHAT)
    loaded = ready(request.app[SERVICE], body.model)
    if not body.stream:
        answer = await chat_answer(body, loaded)
        return await long_response(request, answer)
    job, watch = await chat_job(body, loaded)
    namer, told = spelling(body, loaded), options(body, loaded, body.logprobs is True)
    chunk = envelope(job.id, "chat.completion.chunk", loaded.card.name)
    delivery = Delivery(job.n)
    sink = spaced(delivery.take, stream_interval(body))
    if watch.reading.plain:
        async with running(loaded.engine, [job], sink) as runs:
            check_experts(runs, [job], loaded)
            shape = ChatShape(body, namer, runs[0], job.prompt)
            return await stream_chunks(request, delivery, (chunk, shape, told), runs, _patient(job))
    async with running(Watcher(loaded.engine, loaded.tokenizer, watch), [job], sink) as runs:
        run = runs[0]
        assert isinstance(run, WatchedRun)
        check_experts(runs, [job], loaded)
        frames = AnswerChunks(chunk, told, ChatShape(body, namer, run, job.prompt), run, watch.reading)
        async with EventStream(request) as stream:
            await delivery.run(
                stream, frames, _patient(job), routed_chunk(chunk, told, runs), prompt_weight(runs)
            )
        return stream.response


async def chat_answer(body: ChatBody, loaded: Loaded) -> dict[str, object]:
    """The whole answer, for whoever asks: a request, a line of a batch, `app.offline`."""
    job, watch = await chat_job(body, loaded)
    namer, told = spelling(body, loaded), options(body, loaded, body.logprobs is True)
    plain = watch.reading.plain
    engine = loaded.engine if plain else Watcher(loaded.engine, loaded.tokenizer, watch)
    collector = Collector(job.n)
    async with running(engine, [job], collector.take) as runs:
        run = runs[0]
        check_states(runs, [job], loaded)
        check_experts(runs, [job], loaded)
        pieces = await collector.collect()
        whole = envelope(job.id, "chat.completion", loaded.card.name)

        def answer() -> dict[str, object]:
            extras = prompt_extras(body, run, namer, job.prompt)
            read = [_plain(piece) if plain else read_message(watch.reading, piece) for piece in pieces]
            used = _used(run, pieces, run.reasoning_tokens if isinstance(run, WatchedRun) else 0)
            if echo := _echo(body):
                read = [
                    ({**message, "content": f"{echo}{message['content'] or ''}"}, ended)
                    for message, ended in read
                ]
            return with_extras(_answer(whole, read, pieces, told, namer) | used | extras, body, runs, pieces)

        count = prompt_weight(runs) + sum(len(piece.logprobs or ()) for piece in pieces)
        return with_last_states(await aside(count, answer), [job], runs, pieces)


def _patient(job: Job) -> bool:
    """Prompt log-probabilities are complete once choice 0 has begun, not before."""
    return job.sampling.prompt_logprobs >= 0 and job.n > 1


async def chat_job(body: ChatBody, loaded: Loaded) -> tuple[Job, Watch]:
    """Everything checked that can be checked without tokens, the prompt rendered, and how to read
    what comes back."""
    budget = thinking_budget(body, loaded)
    refuse_unsupported(body, takes=("use_beam_search", "chat_template"))
    tools = chosen_tools(body)
    n = choices(body.n)
    root = root_key(body.cache_salt, body.extra_key)
    sampling = sampling_params(
        body,
        loaded.card,
        min_tokens=body.min_tokens or 0,
        logprobs=_logprobs_wanted(body),
        prompt_logprobs=prompt_logprobs_wanted(body),
        experts_from=experts_wanted(body, loaded.card),
    )
    job = Job(
        id=request_id(body, "chatcmpl"),
        prompt="",
        sampling=sampling,
        text=text_options(body),
        max_tokens=_max_tokens(body),
        seed=body.seed,
        n=n,
        ignore_eos=body.ignore_eos is True,
        add_special_tokens=body.add_special_tokens is True,  # the template writes its own
        truncate_prompt=truncation(body, loaded.card.context_length),
        truncate_end=body.truncation_side == "right",
        allowed_ids=allowed_ids(body, loaded.card.vocab_size),
        bad_words=bad_words(body),
        grammar=constraint_of(body),
        priority=priority(body.priority),
        root=root,
        keep=keep(body.prompt_cache_key, body.prompt_cache_retention, root),
        beam=beam_options(body),
    )
    family = loaded.tools
    if body.input_ids:
        prompt: str | Ints = check_ids(body.input_ids, loaded.card.vocab_size, "input_ids")
    else:
        template = chosen_template(body.chat_template, loaded)
        prompt = await _render(body, loaded, tools, template)
        family = called_in(family, template.shows_tools, tools.shown)
    if budget == 0 and loaded.reasoning is not None:
        prompt = await unthinking(prompt, loaded.reasoning, loaded)
    job = msgspec.structs.replace(
        job, prompt=prompt, prompt_param="input_ids" if body.input_ids else "messages"
    )
    text = shown(prompt, loaded)
    watch = Watch(reading=_reading(body, loaded, (tools, family), text), budget=budget or None)
    wanted = Wanted(answer=job.grammar, tools=tools.callable, calls=tools.calls, many=tools.many)
    job, watch = constrained(job, text, wanted, watch)
    check_beam(job)
    return job, watch


async def _render(body: ChatBody, loaded: Loaded, tools: Tools, template: ChatTemplate | SentTemplate) -> str:
    messages = await aside(len(body.messages or ()), lambda: check_messages(body.messages))
    if loaded.tools is not None and loaded.tools.short_ids:
        messages = short_ids(messages)
    add, continued = generation_prompt(body.add_generation_prompt, body.continue_final_message)
    arguments = template_arguments(
        body.chat_template_kwargs, documents=body.documents, reasoning_effort=body.reasoning_effort
    )
    if body.reasoning_effort == "none":
        arguments.setdefault("enable_thinking", False)
    return await template.render_async(
        messages,
        tools=tools.shown,
        add_generation_prompt=add,
        continue_final_message=continued,
        **arguments,
    )


def _reading(body: ChatBody, loaded: Loaded, called: tuple[Tools, ToolFamily | None], prompt: str) -> Reading:
    tools, family = called
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
        raise RequestError(f"'{name}' must be at least 1, got {value}.", name)
    return value


def _logprobs_wanted(body: ChatBody) -> int:
    top = body.top_logprobs
    if top is not None and top < 0:
        raise RequestError("'top_logprobs' must not be negative.", "top_logprobs")
    if not body.logprobs:
        if top:
            raise RequestError("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
        return -1
    return top or 0


def _echo(body: ChatBody) -> str:
    """The answer's beginning, which the client has written itself."""
    last = (body.messages or [{}])[-1]
    content = last.get("content")
    return content if body.echo and last.get("role") == "assistant" and isinstance(content, str) else ""


def prompt_extras(body: ChatBody, run: Run, namer: Namer, prompt: str | Ints) -> dict[str, object]:
    """Fields about the prompt that a client asked for."""
    extras: dict[str, object] = {}
    if body.return_token_ids or body.return_prompt_token_ids:
        extras["prompt_token_ids"] = run.prompt.tolist()
    if body.return_prompt_text:
        extras["prompt_text"] = prompt if isinstance(prompt, str) else namer.joined(run.prompt.tolist())
    if body.prompt_logprobs is not None:
        extras["prompt_logprobs"] = vllm_prompt_logprobs(run, namer)
    return extras


Read = tuple[dict[str, object], dict[str, object]]
"""A choice's message, and the fields that say how it ended."""


def _plain(piece: Piece) -> Read:
    assert piece.finish is not None
    return {"role": "assistant", "content": piece.text, "refusal": None}, finish_fields(piece.finish)


def _answer(
    whole: Envelope, read: list[Read], pieces: list[Piece], told: Options, namer: Namer
) -> dict[str, object]:
    listed = []
    for index, ((message, ended), piece) in enumerate(zip(read, pieces, strict=True)):
        choice: dict[str, object] = {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(piece, namer) if told.logprobs else None,
            **ended,
        }
        if told.token_ids:
            choice["token_ids"] = piece.tokens
        listed.append(choice)
    return {**msgspec.structs.asdict(whole), "choices": listed}


def _used(run: Run, pieces: list[Piece], reasoning: int = 0) -> dict[str, object]:
    return {"usage": usage([run], sum(len(piece.tokens) for piece in pieces), reasoning)}
