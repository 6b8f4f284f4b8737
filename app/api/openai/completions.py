"""`/v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TypeVar

import msgspec
from aiohttp import web

from app.api.openai.common import (
    envelope,
    options,
    prompt_logprobs_wanted,
    request_id,
    spelling,
    stream_chunks,
    with_extras,
)
from app.api.openai.stream import Envelope, Options, finish_fields, thought, usage
from app.api.request.beam import beam_options
from app.api.request.constraint import constraint_of
from app.api.request.embeds import embedded, prompt_embeds
from app.api.request.experts import check_experts, experts_wanted
from app.api.request.hidden import check_states, with_last_states
from app.api.request.logprobs import CompletionLogprobs, Namer, prompt_entries, vllm_prompt_logprobs
from app.api.request.prompts import check_prompt, split_prompts
from app.api.request.reasoning import bounded, thinking_budget
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
from app.api.request.schema import COMPLETION, CompletionBody, refuse_unsupported
from app.api.request.suffix import inserting
from app.engine.job import Job, Piece, Run
from app.http.aside import aside, prompt_count
from app.http.body import decoded
from app.http.delivery import Collector, Delivery, prompt_weight, running, spaced
from app.http.keys import SERVICE
from app.http.reply import long_response
from app.service import Loaded
from core.errors import RequestError
from core.types import Floats

P = TypeVar("P")

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, and everybody's after it."""

_TAKES = ("use_beam_search", "suffix")


class CompletionShape:
    """Completions' part of a chunk: text, after the prompt itself when echoed."""

    __slots__ = ("_body", "_echoes", "_logprobs", "_n", "_namer", "_runs", "_told")

    open_first = b'"text":'
    open_next = b'"text":'
    close = b""
    empty = b'"text":""'

    def __init__(
        self, body: CompletionBody, namer: Namer, runs: Sequence[Run], echoes: Sequence[str]
    ) -> None:
        """`echoes`: the prompts as text, where they are told."""
        self._body = body
        self._namer = namer
        self._runs = runs
        self._echoes = echoes
        self._n = len(runs[0].requests)
        skips = body.skip_special_tokens is not False
        self._logprobs = [CompletionLogprobs(namer, skips) for run in runs for _ in run.requests]
        self._told = [False] * len(self._logprobs)

    def first_text(self, index: int) -> str:
        """The echoed prompt, or nothing."""
        return self._echoes[index // self._n] if self._body.echo else ""

    def first_chunk(self) -> dict[str, object]:
        """Nothing: choices are of several prompts."""
        return {}

    def first_extra(self, index: int) -> dict[str, object]:
        """Fields about the prompt that the client asked for."""
        run = self._runs[index // self._n]
        extras: dict[str, object] = {}
        if self._body.return_token_ids or self._body.return_prompt_token_ids:
            known = run.requests[0].embeds is None
            extras["prompt_token_ids"] = run.prompt.tolist() if known else None
        if self._body.return_prompt_text:
            extras["prompt_text"] = self._echoes[index // self._n]
        if self._body.prompt_logprobs is not None:
            extras["prompt_logprobs"] = vllm_prompt_logprobs(run, self._namer)
        return extras

    def logprobs(self, index: int, piece: Piece) -> object:
        """Of the piece's tokens, after those of the prompt when it is echoed."""
        if not self._body.echo or self._told[index]:
            return self._logprobs[index].of(piece)
        self._told[index] = True
        which = index // self._n
        return self._logprobs[index].of(piece, prompt_entries(self._runs[which]), self._echoes[which])


async def completions(request: web.Request) -> web.StreamResponse:
    """Several prompts run side by side; choices are numbered prompt by prompt."""
    body = await decoded(request, COMPLETION)
    loaded = ready(request.app[SERVICE], body.model)
    if not body.stream:
        answer = await completion_answer(body, loaded)
        return await long_response(request, answer)
    id = request_id(body, "cmpl")
    embeds = await prompt_embeds(body, loaded)
    jobs = await aside(prompt_count(body.prompt), lambda: completion_jobs(body, id, loaded, embeds))
    delivery = Delivery(sum(job.n for job in jobs))
    engine = bounded(loaded, thinking_budget(body, loaded))
    async with running(engine, jobs, spaced(delivery.take, stream_interval(body))) as runs:
        check_experts(runs, jobs, loaded)
        shape = _shape(body, jobs, runs, loaded)
        chunk = (envelope(id, "text_completion", loaded.card.name), shape, _told(body, loaded))
        # Prompt log-probabilities are complete once choice 0 has begun, not before.
        patient = jobs[0].sampling.prompt_logprobs >= 0 and jobs[0].n > 1
        return await stream_chunks(request, delivery, chunk, runs, patient)


async def completion_answer(body: CompletionBody, loaded: Loaded) -> dict[str, object]:
    """The whole answer, for whoever asks: a request, a line of a batch, `app.offline`."""
    id = request_id(body, "cmpl")
    embeds = await prompt_embeds(body, loaded)
    jobs = await aside(prompt_count(body.prompt), lambda: completion_jobs(body, id, loaded, embeds))
    collector = Collector(sum(job.n for job in jobs))
    engine = bounded(loaded, thinking_budget(body, loaded))
    async with running(engine, jobs, collector.take) as runs:
        check_states(runs, jobs, loaded)
        check_experts(runs, jobs, loaded)
        pieces = await collector.collect()
        head = envelope(id, "text_completion", loaded.card.name)
        answer = await _answer(head, pieces, runs, _told(body, loaded), _shape(body, jobs, runs, loaded))
        return with_last_states(with_extras(answer, body, runs, pieces), jobs, runs, pieces)


def _told(body: CompletionBody, loaded: Loaded) -> Options:
    return options(body, loaded, body.logprobs is not None)


def _shape(body: CompletionBody, jobs: Sequence[Job], runs: Sequence[Run], loaded: Loaded) -> CompletionShape:
    return CompletionShape(body, spelling(body, loaded), runs, _echoes(body, jobs, runs, loaded))


def completion_jobs(
    body: CompletionBody, id: str, loaded: Loaded, embeds: Sequence[Floats] = ()
) -> list[Job]:
    """One job per prompt, everything checked that can be checked without tokens. `embeds` are those of
    `prompt_embeds`, where the route takes them: vLLM's order has them first."""
    refuse_unsupported(body, takes=(*_TAKES, "prompt_embeds") if embeds else _TAKES)
    if not body.prompt and not embeds:
        raise RequestError("'prompt' must not be empty.", "prompt")
    prompts = split_prompts(body.prompt, "prompt")[0] if body.prompt else []
    n = choices(body.n, len(prompts) + len(embeds))
    vocab_size = loaded.card.vocab_size
    logprobs = _logprobs(body)
    root = root_key(body.cache_salt, body.extra_key)
    base = Job(
        id=id,
        prompt="",
        sampling=sampling_params(
            body,
            loaded.card,
            min_tokens=body.min_tokens or 0,
            logprobs=logprobs,
            prompt_logprobs=max(prompt_logprobs_wanted(body), logprobs if body.echo else -1),
            experts_from=experts_wanted(body, loaded.card),
        ),
        text=text_options(body),
        max_tokens=_max_tokens(body),
        seed=body.seed,
        n=n,
        ignore_eos=body.ignore_eos is True,
        add_special_tokens=body.add_special_tokens is not False,
        truncate_prompt=truncation(body, loaded.card.context_length),
        truncate_end=body.truncation_side == "right",
        allowed_ids=allowed_ids(body, vocab_size),
        bad_words=bad_words(body),
        grammar=constraint_of(body),
        priority=priority(body.priority),
        root=root,
        keep=keep(body.prompt_cache_key, body.prompt_cache_retention, root),
        beam=beam_options(body),
    )
    base = inserting(base, body, prompts, loaded)
    jobs = [embedded(base, rows, param) for param, rows in _named("prompt_embeds", embeds)]
    for param, prompt in _named("prompt", prompts):
        checked = check_prompt(prompt, vocab_size, param)
        jobs.append(msgspec.structs.replace(base, prompt=checked, prompt_param=param))
    return jobs if len(jobs) == 1 else _numbered(jobs)


def _logprobs(body: CompletionBody) -> int:
    if body.logprobs is None:
        return -1
    if body.logprobs < 0:
        raise RequestError("'logprobs' must not be negative.", "logprobs")
    return body.logprobs


def _named(param: str, prompts: Sequence[P]) -> list[tuple[str, P]]:
    """Prompts with the path that an error about them names."""
    if len(prompts) == 1:
        return [(param, prompts[0])]
    return [(f"{param}[{i}]", prompt) for i, prompt in enumerate(prompts)]


def _numbered(jobs: Sequence[Job]) -> list[Job]:
    return [msgspec.structs.replace(job, id=f"{job.id}-{i}") for i, job in enumerate(jobs)]


def _max_tokens(body: CompletionBody) -> int:
    value = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if value < 0 or (value == 0 and not body.echo):
        raise RequestError(f"'max_tokens' must be at least 1 (0 with 'echo'), got {value}.", "max_tokens")
    return value


def _echoes(body: CompletionBody, jobs: Sequence[Job], runs: Sequence[Run], loaded: Loaded) -> list[str]:
    """The prompts as text, in the client's own words where it sent words and none were cut."""
    if not body.echo and not body.return_prompt_text:
        return []
    skip = body.skip_special_tokens is not False
    return [
        job.prompt
        if isinstance(job.prompt, str) and job.truncate_prompt is None
        else loaded.tokenizer.decode(run.prompt.tolist(), skip_special=skip)
        for job, run in zip(jobs, runs, strict=True)
    ]


async def _answer(
    head: Envelope, pieces: Sequence[Piece], runs: Sequence[Run], told: Options, shape: CompletionShape
) -> dict[str, object]:
    listed = []
    for index, piece in enumerate(pieces):
        count = prompt_weight(runs) + len(piece.logprobs or ())
        listed.append(await aside(count, partial(_choice, index, piece, told, shape)))
        if told.logprobs:
            await asyncio.sleep(0)  # about 6 µs a token: choice by choice, not all in one slice
    tokens = sum(len(piece.tokens) for piece in pieces)
    used = usage(runs, tokens, thought(runs))
    return {**msgspec.structs.asdict(head), "choices": listed, "usage": used}


def _choice(index: int, piece: Piece, told: Options, shape: CompletionShape) -> dict[str, object]:
    assert piece.finish is not None
    choice: dict[str, object] = {
        "index": index,
        "text": shape.first_text(index) + piece.text,
        "logprobs": shape.logprobs(index, piece) if told.logprobs else None,
        **finish_fields(piece.finish),
        **shape.first_extra(index),
    }
    if told.token_ids:
        choice["token_ids"] = piece.tokens
    return choice
