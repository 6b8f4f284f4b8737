"""`/generate`, after SGLang: streamed text is cumulative, everything else is in `meta_info`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
from aiohttp import web

from app.api.request.constraint import constraint_of
from app.api.request.embeds import EmbeddedPrompts, embedded, input_embeds
from app.api.request.experts import experts_start
from app.api.request.field_names import fields_named
from app.api.request.prompts import Prompt, check_prompt, prompt_ids, split_prompts
from app.api.request.reasoning import limited_thinking, thinking_budget
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
    selected,
    stream_interval,
    text_options,
    wants_states,
)
from app.api.request.schema import NativeBody, NativeSampling, refuse_unsupported
from app.api.sglang.answer import NativeFrames
from app.api.sglang.sessions import SESSIONS, in_session
from app.engine.job import Job
from app.http.answer import AnswerSpec, answer
from app.http.aside import aside, prompt_count
from app.http.tenant import tenant
from app.ids import random_hex
from app.service import Loaded
from core.errors import RequestError, field_error
from core.types import Floats, RootKey

ROUTES = Routes()

DEFAULT_MAX_NEW_TOKENS = 128
"""SGLang's default."""

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
"""Names of fields in the engine's errors, and those of this route."""


@ROUTES.post(NativeBody, "/generate", example="text", has="text meta_info", lists=True, streams=True)
async def generate(request: web.Request, body: NativeBody, loaded: Loaded) -> web.StreamResponse:
    """Continue a text, after SGLang. One prompt gives one object; lists or n > 1 give a list of them."""
    given = await input_embeds(body, loaded)
    count = prompt_count(body.input_ids) + prompt_count(body.text)
    jobs = await aside(count, lambda: native_jobs(body, loaded, given))
    listed = body.session_params is None and not _prompts(body, given).single
    single = not listed and jobs[0].n == 1
    spec = AnswerSpec(
        engine=limited_thinking(loaded, _budget(body, loaded)),
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
        with in_session(request.app[SESSIONS].mine(), body.session_params, spec, ids, loaded) as spec:
            return await answer(request, spec, body.stream is True)


def _budget(body: NativeBody, loaded: Loaded) -> int | None:
    """The limit of thinking tokens, by the field's name in either place."""
    if (budget := thinking_budget(body, loaded)) is not None or body.sampling_params is None:
        return budget
    return thinking_budget(body.sampling_params, loaded, _IN)


def native_jobs(body: NativeBody, loaded: Loaded, given: EmbeddedPrompts | None = None) -> list[Job]:
    """One job per prompt. `given` are those of `input_embeds`."""
    refuse_unsupported(body, takes=("input_embeds", "lora_path"))
    sampling = body.sampling_params or NativeSampling()
    refuse_unsupported(sampling, _IN)
    param, prompts, _ = _prompts(body, given)
    n = choices(sampling.n, len(prompts), _IN)
    ids = _ids(body.rid, len(prompts))
    vocab_size = loaded.card.vocab_size
    base = Job(
        id="",
        prompt="",
        sampling=sampling_params(
            sampling,
            loaded.card,
            _IN,
            min_tokens=sampling.min_new_tokens or 0,
            **_logprobs(body, loaded),
            **_processor(body, sampling),
            **({"hidden": "all"} if wants_states(body) or wants_states(sampling) else {}),
            **requested_fields(body),
            **_experts(body, sampling, loaded),
        ),
        text=text_options(sampling),
        max_tokens=_max_new_tokens(sampling),
        seed=sampling.sampling_seed,
        n=n,
        ignore_eos=sampling.ignore_eos is True,
        allowed_ids=allowed_ids(sampling, vocab_size, _IN) or allowed_ids(body, vocab_size),
        bad_words=bad_words(sampling, _IN) or bad_words(body),
        grammar=constraint_of(body, sampling),
        priority=priority(body.priority),
        owner=tenant(),
    )
    roots = _roots(body, loaded, len(prompts))
    jobs = []
    for i, prompt in enumerate(prompts):
        name = param if len(prompts) == 1 else f"{param}[{i}]"
        job = msgspec.structs.replace(base, id=ids[i], prompt_param=name, root=roots[i])
        if isinstance(prompt, np.ndarray):
            jobs.append(embedded(job, prompt, name))
        else:
            jobs.append(msgspec.structs.replace(job, prompt=check_prompt(prompt, vocab_size, name)))
    return jobs


def _roots(body: NativeBody, loaded: Loaded, prompts: int) -> list[RootKey]:
    """The root key of each prompt: `lora_path` is an adapter for all, or a list with one or none for each."""
    if not isinstance(body.lora_path, list):
        return [root_key(loaded, body.cache_salt, body.extra_key)] * prompts
    if len(body.lora_path) != prompts:
        raise field_error("lora_path", f"must have {prompts} entries, as many as there are prompts")
    each = (selected(loaded, None, adapter) for adapter in body.lora_path)
    return [root_key(one, body.cache_salt, body.extra_key) for one in each]


def _experts(body: NativeBody, sampling: NativeSampling, loaded: Loaded) -> dict[str, int]:
    """First position whose experts are returned, by the field's name in either place."""
    start = experts_start(body, loaded.card)
    return {"experts_from": experts_start(sampling, loaded.card, _IN) if start < 0 else start}


def _processor(body: NativeBody, sampling: NativeSampling) -> dict[str, str]:
    """SGLang has the name of a logit processor next to `sampling_params`, and its parameters inside."""
    if not body.custom_logit_processor:
        return {}
    if body.custom_params is not None:
        return processor_fields(body)
    named = msgspec.structs.replace(sampling, custom_logit_processor=body.custom_logit_processor)
    return processor_fields(named, _IN)


def _max_new_tokens(sampling: NativeSampling) -> int:
    value = DEFAULT_MAX_NEW_TOKENS if sampling.max_new_tokens is None else sampling.max_new_tokens
    if value < 0:
        raise field_error(_IN + "max_new_tokens", "must not be negative")
    return value


class _Prompts(NamedTuple):
    """The field that has the prompts, the prompts, and whether it has one and not a list."""

    param: str
    prompts: Sequence[Prompt | Floats]
    single: bool


def _prompts(body: NativeBody, given: EmbeddedPrompts | None) -> _Prompts:
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
        return [job_id(one, random_hex(32)) for one in rid]
    base = job_id(rid, random_hex(32))
    return [base] if prompts == 1 else [f"{base}-{i}" for i in range(prompts)]


def _logprobs(body: NativeBody, loaded: Loaded) -> dict[str, int | str | tuple[int, ...]]:
    top = body.top_logprobs_num or 0
    start = -1 if body.logprob_start_len is None else body.logprob_start_len
    if top < 0:
        raise field_error("top_logprobs_num", "must not be negative")
    if start < -1:
        raise field_error("logprob_start_len", "must be at least -1")
    if not body.return_logprob:
        return {}
    named = tuple(body.token_ids_logprob or ())
    fields: dict[str, int | str | tuple[int, ...]] = {"logprobs": top, "logprob_ids": named}
    if loaded.card.sampling.logprobs_mode == "raw_logprobs":
        fields["logprobs_mode"] = "masked_logprobs"  # SGLang's: forbidden tokens are not among the top ones
    if start != -1:
        fields |= {"prompt_logprobs": top, "prompt_logprobs_start": start, "prompt_logprob_ids": named}
    return fields
