"""What the two OpenAI routes do alike."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from aiohttp import web

from app.http.chunks import Chunks, Envelope, Options, Shape
from app.http.delivery import Delivery
from app.http.sampling import job_id
from app.http.schema import Generation
from app.http.sse import EventStream
from app.job import Run
from core.errors import RequestError


def request_id(body: Generation, prefix: str) -> str:
    """The client's own id, or `prefix` and random digits."""
    param = "rid" if body.rid else "request_id"
    return job_id(body.rid or body.request_id, f"{prefix}-{secrets.token_hex(16)}", param)


def envelope(id: str, object: str, model: str) -> Envelope:
    """The envelope of an answer made now."""
    return Envelope(id=id, object=object, created=int(time.time()), model=model)


def options(body: Generation, logprobs: bool) -> Options:
    """What the client asked to be told."""
    stream = body.stream_options
    return Options(
        include_usage=stream is not None and stream.include_usage is True,
        continuous_usage=stream is not None and stream.continuous_usage_stats is True,
        logprobs=logprobs,
        token_ids=body.return_token_ids is True,
    )


def prompt_logprobs_wanted(body: Generation) -> int:
    """`prompt_logprobs` as the sampling parameter: -1 for none."""
    value = body.prompt_logprobs
    if value is None:
        return -1
    if value < 0:
        raise RequestError("'prompt_logprobs' must not be negative.", "prompt_logprobs")
    return value


async def stream_chunks(
    request: web.Request,
    delivery: Delivery,
    chunks: tuple[Envelope, Shape, Options],
    runs: Sequence[Run],
    patient: bool = False,
) -> web.StreamResponse:
    """Answer with a stream, until every choice has ended."""
    total = sum(len(run.requests) for run in runs)
    frames = Chunks(*chunks, runs, total)
    async with EventStream(request) as stream:
        await delivery.run(stream, frames, patient)
    return stream.response
