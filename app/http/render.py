"""What a request would run, without running it: vLLM's `render` routes."""

from __future__ import annotations

import asyncio

import numpy as np
from aiohttp import web
from aiohttp.typedefs import Handler

from app.http.body import decode, read_body
from app.http.chat import chat_job
from app.http.completions import completion_jobs
from app.http.keys import SERVICE
from app.http.openai import request_id
from app.http.reply import json_response
from app.http.sampling import ready
from app.http.schema import CHAT, COMPLETION
from app.job import Job
from app.service import Loaded


async def render_chat(request: web.Request) -> web.StreamResponse:
    """The prompt of a conversation, as text and as tokens."""
    body = decode(CHAT, await read_body(request))
    loaded = ready(request.app[SERVICE], body.model)
    job, _ = await chat_job(body, loaded)
    return json_response(await _told(job, loaded))


async def render_completions(request: web.Request) -> web.StreamResponse:
    """The prompts of a body, each as tokens."""
    body = decode(COMPLETION, await read_body(request))
    loaded = ready(request.app[SERVICE], body.model)
    told = []
    for job in completion_jobs(body, request_id(body, "cmpl"), loaded):
        told.append(await _told(job, loaded))
        await asyncio.sleep(0)  # short texts are encoded at once: a long list would be one slice
    return json_response(told)


async def _told(job: Job, loaded: Loaded) -> dict[str, object]:
    ids, text = job.prompt, None
    if isinstance(ids, str):
        text = ids
        ids = await loaded.tokenizer.encode_async(ids, job.add_special_tokens, job.prompt_param)
    assert isinstance(ids, np.ndarray)
    return {
        "request_id": job.id,
        "model": loaded.card.name,
        "prompt": text,
        "token_ids": ids.tolist(),
        "max_model_len": loaded.card.context_length,
    }


TABLE: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/chat/completions/render", render_chat),
    ("POST", "/v1/completions/render", render_completions),
)
