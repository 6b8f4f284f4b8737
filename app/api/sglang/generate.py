"""`/generate`, after SGLang: streamed text is cumulative, everything else is in `meta_info`."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
from aiohttp import web

from app.api.request.constraint import constraint_of
from app.api.request.embeds import Given, embedded, input_embeds
from app.api.request.experts import experts_wanted
from app.api.request.field_names import fields_named
from app.api.request.prompts import Prompt, check_prompt, prompt_ids, split_prompts
from app.api.request.reasoning import bounded, thinking_budget
from app.api.request.routing import Routes
from app.api.request.sampling import (
    allowed_ids,
    bad_words,
    choices,
    job_id,
    priority,
    processor_fields,
    requested_fields,
    root_key,
    sampling_params,
    stream_interval,
    text_options,
    wants_states,
)
from app.api.request.schema import NativeBody, NativeSampling, refuse_unsupported
from app.api.sglang.answer import NativeFrames
from app.api.sglang.sessions import SESSIONS, taking_part
from app.engine.job import Job
from app.http.answer import AnswerSpec, answer
from app.http.aside import aside, prompt_count
from app.http.tenant import tenant
from app.service import Loaded
from core.errors import RequestError, field_error
from core.types import Floats

ROUTES = Routes()

DEFAULT_MAX_NEW_TOKENS = 128
"""SGLang's."""

_IN = "sampling_params."

_NAMES = {
    **{name: _IN + name for name in NativeSampling.__struct_fields__},
    "max_tokens": "sampling_params.max_new_tokens",
    "min_tokens": "sampling_params.min_new_tokens",
    "seed": "sampling_params.sampling_seed",
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
    "prompt_logprobs_start": "logprob_start_len",
    "logprob_token_ids": "token_ids_logprob",
    "request_id": "rid",
    **{name: name for name in NativeBody.__struct_fields__ if name.startswith(("return_", "routed_"))},
    "custom_logit_processor": "custom_logit_processor",
    "input_embeds": "input_embeds",
}
"""What the engine calls a field, and what this route does."""


@ROUTES.post(NativeBody, "/generate", example="text", has="text meta_info", lists=True, streams=True)
async def generate(request: web.Request, body: NativeBody, loaded: Loaded) -> web.StreamResponse:
    """Continue a text, after SGLang. One prompt gives one object; lists or n > 1 give a list of them."""
    given = await input_embeds(body, loaded)
    count = prompt_count(body.input_ids) + prompt_count(body.text)
    jobs = await aside(count, lambda: native_jobs(body, loaded, given))
    listed = body.session_params is None and not _prompts(body, given).single
    single = not listed and jobs[0].n == 1
    spec = AnswerSpec(
        engine=bounded(loaded, _budget(body, loaded)),
        jobs=jobs,
        frames=partial(NativeFrames, body, loaded, jobs, single),
        every=stream_interval(body.sampling_params or NativeSampling(), _IN),
    )
    with fields_named(_NAMES):
        if body.session_params is None:
            return await answer(request, spec, body.stream is True)
        if len(jobs) > 1 or jobs[0].n > 1:
            raise RequestError("A session takes one prompt at a time, with n=1.", "session_params")
        ids = await prompt_ids(jobs[0], loaded)  # a session adds to tokens, not to text
        with taking_part(request.app[SESSIONS][tenant()], body.session_params, spec, ids, loaded) as spec:
            return await answer(request, spec, body.stream is True)


def _budget(body: NativeBody, loaded: Loaded) -> int | None:
    """By the name in either place."""
    if (budget := thinking_budget(body, loaded)) is not None or body.sampling_params is None:
        return budget
    return thinking_budget(body.sampling_params, loaded, _IN)


def native_jobs(body: NativeBody, loaded: Loaded, given: Given | None = None) -> list[Job]:
    """One job per prompt. `given` are those of `input_embeds`."""
    refuse_unsupported(body, takes=("input_embeds",))
    asked = body.sampling_params or NativeSampling()
    refuse_unsupported(asked, _IN)
    param, prompts, _ = _prompts(body, given)
    n = choices(asked.n, len(prompts), _IN)
    ids = _ids(body.rid, len(prompts))
    vocab_size = loaded.card.vocab_size
    base = Job(
        id="",
        prompt="",
        sampling=sampling_params(
            asked,
            loaded.card,
            _IN,
            min_tokens=asked.min_new_tokens or 0,
            **_logprobs(body, loaded),
            **_processor(body, asked),
            **({"hidden": "all"} if wants_states(body) else {}),
            **requested_fields(body),
            **_experts(body, asked, loaded),
        ),
        text=text_options(asked),
        max_tokens=_max_new_tokens(asked),
        seed=asked.sampling_seed,
        n=n,
        ignore_eos=asked.ignore_eos is True,
        allowed_ids=allowed_ids(asked, vocab_size, _IN) or allowed_ids(body, vocab_size),
        bad_words=bad_words(asked, _IN) or bad_words(body),
        grammar=constraint_of(body, asked, _IN),
        priority=priority(body.priority),
        root=root_key(body.cache_salt, body.extra_key),
    )
    jobs = []
    for i, prompt in enumerate(prompts):
        name = param if len(prompts) == 1 else f"{param}[{i}]"
        job = msgspec.structs.replace(base, id=ids[i], prompt_param=name)
        if isinstance(prompt, np.ndarray):
            jobs.append(embedded(job, prompt, name))
        else:
            jobs.append(msgspec.structs.replace(job, prompt=check_prompt(prompt, vocab_size, name)))
    return jobs


def _experts(body: NativeBody, asked: NativeSampling, loaded: Loaded) -> dict[str, int]:
    """By the names in either place."""
    start = experts_wanted(body, loaded.card)
    return {"experts_from": experts_wanted(asked, loaded.card, _IN) if start < 0 else start}


def _processor(body: NativeBody, asked: NativeSampling) -> dict[str, str]:
    """SGLang names a logit processor beside `sampling_params`, and what it is called with inside."""
    if not body.custom_logit_processor:
        return {}
    if body.custom_params is not None:
        return processor_fields(body)
    named = msgspec.structs.replace(asked, custom_logit_processor=body.custom_logit_processor)
    return processor_fields(named, _IN)


def _max_new_tokens(asked: NativeSampling) -> int:
    value = DEFAULT_MAX_NEW_TOKENS if asked.max_new_tokens is None else asked.max_new_tokens
    if value < 0:
        raise field_error(_IN + "max_new_tokens", "must not be negative")
    return value


class _Prompts(NamedTuple):
    """The field that has the prompts, the prompts, and whether it is one and not a list."""

    param: str
    prompts: Sequence[Prompt | Floats]
    single: bool


def _prompts(body: NativeBody, given: Given | None) -> _Prompts:
    if [body.text, body.input_ids, given].count(None) != 2:
        raise RequestError("Give exactly one of 'text', 'input_ids' and 'input_embeds'.", "text")
    if given is not None:
        return _Prompts("input_embeds", given.prompts, given.single)
    param, value = ("text", body.text) if body.text is not None else ("input_ids", body.input_ids)
    if not value:
        raise field_error(param, "must not be empty")
    return _Prompts(param, *split_prompts(value, param))


def _ids(rid: str | list[str] | None, prompts: int) -> list[str]:
    if isinstance(rid, list):
        if len(rid) != prompts:
            raise field_error("rid", f"has {len(rid)} ids for {prompts} prompts")
        return [job_id(one, secrets.token_hex(16)) for one in rid]
    base = job_id(rid, secrets.token_hex(16))
    return [base] if prompts == 1 else [f"{base}-{i}" for i in range(prompts)]


def _logprobs(body: NativeBody, loaded: Loaded) -> dict[str, int | str | tuple[int, ...]]:
    if not body.return_logprob:
        return {}
    top = body.top_logprobs_num or 0
    start = -1 if body.logprob_start_len is None else body.logprob_start_len
    if top < 0:
        raise field_error("top_logprobs_num", "must not be negative")
    if start < -1:
        raise field_error("logprob_start_len", "must be at least -1")
    named = tuple(body.token_ids_logprob or ())
    told: dict[str, int | str | tuple[int, ...]] = {"logprobs": top, "logprob_ids": named}
    if loaded.card.sampling.logprobs_mode == "raw_logprobs":
        told["logprobs_mode"] = "masked_logprobs"  # SGLang's: what a grammar forbids is not among the best
    if start != -1:
        told |= {"prompt_logprobs": top, "prompt_logprobs_start": start, "prompt_logprob_ids": named}
    return told
