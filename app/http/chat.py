"""`/v1/chat/completions`."""

from __future__ import annotations

import msgspec
from aiohttp import web

from app.http.body import decode, read_body
from app.http.chunks import Envelope, Options, finish_fields, usage
from app.http.delivery import Collector, Delivery, running
from app.http.keys import SERVICE
from app.http.logprobs import Namer, chat_logprobs, vllm_prompt_logprobs
from app.http.messages import check_messages, check_tools, generation_prompt, template_arguments
from app.http.openai import envelope, options, prompt_logprobs_wanted, request_id, stream_chunks
from app.http.refuse import check_tool_choice, refuse_unsupported
from app.http.reply import json_response
from app.http.sampling import choices, priority, ready, root_key, sampling_params, text_options, truncation
from app.http.schema import CHAT, ChatBody
from app.job import Job, Piece, Run
from app.service import Loaded
from core.errors import RequestError


class ChatShape:
    """Chat's part of a chunk: a delta, the role in the first one."""

    __slots__ = ("_body", "_namer", "_run")

    open_first = b'"delta":{"role":"assistant","content":'
    open_next = b'"delta":{"content":'
    close = b"}"
    empty = b'"delta":{}'

    def __init__(self, body: ChatBody, namer: Namer, run: Run) -> None:
        self._body = body
        self._namer = namer
        self._run = run

    def first_text(self, index: int) -> str:
        """Chat echoes nothing."""
        return ""

    def first_extra(self, index: int) -> dict[str, object]:
        """The prompt's ids and log-probabilities, once per choice."""
        return prompt_extras(self._body, self._run, self._namer)

    def logprobs(self, index: int, piece: Piece) -> object:
        """Of the piece's tokens."""
        return chat_logprobs(piece, self._namer)


async def chat(request: web.Request) -> web.StreamResponse:
    """Render, run, answer."""
    body = decode(CHAT, await read_body(request))
    loaded = ready(request.app[SERVICE], body.model)
    job = await chat_job(body, loaded)
    namer = Namer(loaded.tokenizer, body.return_tokens_as_token_ids is True)
    told = options(body, body.logprobs is True)
    if body.stream:
        delivery = Delivery(job.n)
        async with running(loaded.engine, [job], delivery.take) as runs:
            shape = ChatShape(body, namer, runs[0])
            chunk = envelope(job.id, "chat.completion.chunk", loaded.card.name)
            patient = job.sampling.prompt_logprobs >= 0 and job.n > 1
            return await stream_chunks(request, delivery, (chunk, shape, told), runs, patient)
    collector = Collector(job.n)
    async with running(loaded.engine, [job], collector.take) as runs:
        pieces = await collector.collect()
        whole = envelope(job.id, "chat.completion", loaded.card.name)
        extras = prompt_extras(body, runs[0], namer)
        return json_response(_answer(whole, pieces, runs[0], told, namer) | extras)


async def chat_job(body: ChatBody, loaded: Loaded) -> Job:
    """Everything checked that can be checked without tokens, and the prompt rendered."""
    refuse_unsupported(body)
    check_tool_choice(body.tool_choice)
    n = choices(body.n)
    sampling = sampling_params(
        body,
        loaded.card.vocab_size,
        min_tokens=body.min_tokens or 0,
        logprobs=_logprobs_wanted(body),
        prompt_logprobs=prompt_logprobs_wanted(body),
    )
    messages = check_messages(body.messages)
    tools = check_tools(body.tools)
    add, continued = generation_prompt(body.add_generation_prompt, body.continue_final_message)
    arguments = template_arguments(
        body.chat_template_kwargs, documents=body.documents, reasoning_effort=body.reasoning_effort
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
        priority=priority(body.priority),
        root=root_key(body.cache_salt, body.extra_key),
        prompt_param="messages",
    )
    prompt = await loaded.template.render_async(
        messages,
        tools=None if body.tool_choice == "none" else tools,
        add_generation_prompt=add,
        continue_final_message=continued,
        **arguments,
    )
    return msgspec.structs.replace(job, prompt=prompt)


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


def prompt_extras(body: ChatBody, run: Run, namer: Namer) -> dict[str, object]:
    """Fields about the prompt that a client asked for."""
    extras: dict[str, object] = {}
    if body.return_token_ids:
        extras["prompt_token_ids"] = run.prompt.tolist()
    if body.prompt_logprobs is not None:
        extras["prompt_logprobs"] = vllm_prompt_logprobs(run, namer)
    return extras


def _answer(whole: Envelope, pieces: list[Piece], run: Run, told: Options, namer: Namer) -> dict[str, object]:
    listed = []
    for index, piece in enumerate(pieces):
        assert piece.finish is not None
        choice: dict[str, object] = {
            "index": index,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": chat_logprobs(piece, namer) if told.logprobs else None,
            **finish_fields(piece.finish),
        }
        if told.token_ids:
            choice["token_ids"] = piece.tokens
        listed.append(choice)
    tokens = sum(len(piece.tokens) for piece in pieces)
    return {**msgspec.structs.asdict(whole), "choices": listed, "usage": usage([run], tokens)}
