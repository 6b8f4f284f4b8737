"""vLLM's `render` routes: they return what a request would run, without running it."""

from __future__ import annotations

import asyncio

import numpy as np
from aiohttp import web

from app.api.openai.chat import chat_job
from app.api.openai.completions import completion_jobs
from app.api.request.constraint import CONSTRAINTS, structured_outputs
from app.api.request.routing import Routes
from app.api.request.sampling import request_id
from app.api.request.schema import ChatBody, CompletionBody, Generation
from app.engine.job import Job
from app.engine.submit import encoded
from app.service import Loaded

ROUTES = Routes()

_APART = frozenset({"model", "stream", "stream_options", "priority", "cache_salt"})
"""Fields that have places of their own in the answer."""
_SAMPLING = tuple(
    name
    for name in Generation.__struct_fields__
    if name not in CONSTRAINTS | _APART | {"rid", "request_id", "add_special_tokens", "thinking_token_budget"}
    and not name.startswith(("return_", "prompt_cache_", "trunc"))
)
"""Fields of `/inference/v1/generate`, which continues from tokens."""


@ROUTES.post(ChatBody, "/v1/chat/completions/render", example="messages", has="request_id token_ids")
async def render_chat(request: web.Request, body: ChatBody, loaded: Loaded) -> object:
    """The prompt of a conversation, as text and as tokens."""
    job, _ = await chat_job(body, loaded)
    return await rendered(job, body, loaded)


@ROUTES.post(CompletionBody, "/v1/completions/render", example="prompt", lists=True)
async def render_completions(request: web.Request, body: CompletionBody, loaded: Loaded) -> object:
    """The prompts of a body, each as tokens."""
    prompts = []
    for job in completion_jobs(body, request_id(body, "cmpl"), loaded):
        prompts.append(await rendered(job, body, loaded))
        await asyncio.sleep(0)  # short texts are encoded at once: a long list would be one slice
    return prompts


async def rendered(job: Job, body: ChatBody | CompletionBody, loaded: Loaded) -> dict[str, object]:
    """vLLM's answer, which `/inference/v1/generate` takes, with the text and the context length added.
    `features` is for images, `kv_transfer_params` for prompts that are computed elsewhere: both are None."""
    ids, text, offsets = job.prompt, None, None
    if isinstance(ids, str):
        text = ids
        ids = await encoded(job, loaded.tokenizer)
        if body.return_token_offsets and not job.suffix:
            offsets = await loaded.tokenizer.offsets_async(text, job.add_special_tokens)
    assert isinstance(ids, np.ndarray)
    answer: dict[str, object] = {
        "request_id": job.id,
        "model": loaded.card.name,
        "prompt": text,
        "token_ids": ids.tolist(),
        "features": None,
        "sampling_params": _sampling(job, body),
        "stream": body.stream is True,
        "stream_options": body.stream_options if body.stream else None,
        "cache_salt": body.cache_salt,
        "priority": job.priority,
        "kv_transfer_params": None,
        "max_model_len": loaded.card.context_length,
    }
    return answer | ({"token_offsets": offsets} if body.return_token_offsets else {})


def _sampling(job: Job, body: ChatBody | CompletionBody) -> dict[str, object]:
    """The sampling parameters as `/inference/v1/generate` takes them. One constraint covers all that was
    requested, thinking and calls too; without one there may be a limit for thinking."""
    fields = {name: getattr(body, name) for name in _SAMPLING}
    fields["skip_special_tokens"] = job.text.skip_special_tokens
    if job.suffix:
        fields["stop_token_ids"] = sorted(job.sampling.stop_ids)
    if isinstance(body, ChatBody):
        if body.max_completion_tokens is not None:
            fields["max_tokens"] = body.max_completion_tokens
        if body.logprobs:
            fields["logprobs"] = body.top_logprobs or 0
    else:
        fields["max_tokens"] = job.max_tokens
        fields["logprobs"] = body.logprobs
    if job.grammar is not None:
        fields["structured_outputs"] = structured_outputs(job.grammar)
    else:
        fields["thinking_token_budget"] = body.thinking_token_budget or body.max_thinking_tokens
    fields.pop("max_thinking_tokens")
    return {name: value for name, value in fields.items() if value is not None}
