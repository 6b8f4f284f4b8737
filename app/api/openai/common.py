"""What the two OpenAI routes do alike."""

from __future__ import annotations

import secrets
import time

from app.api.openai.stream import Envelope, Options
from app.api.request.logprobs import Namer
from app.api.request.sampling import job_id
from app.api.request.schema import ChatBody, CompletionBody, Generation, StreamOptions
from app.service import Loaded
from core.errors import RequestError


def request_id(body: Generation, prefix: str) -> str:
    """The client's own id, or `prefix` and random digits."""
    param = "rid" if body.rid else "request_id"
    return job_id(body.rid or body.request_id, f"{prefix}-{secrets.token_hex(16)}", param)


def envelope(id: str, object: str, model: str) -> Envelope:
    """The envelope of an answer made now."""
    return Envelope(id=id, object=object, created=int(time.time()), model=model)


def options(body: ChatBody | CompletionBody, loaded: Loaded, logprobs: bool) -> Options:
    """What the client asked to be told, or the operator. Raises `RequestError` for what a stream does not
    tell."""
    if body.stream and body.return_meta_info:
        param = "return_meta_info"
        raise RequestError(f"'{param}' is not available with 'stream'.", param, "unsupported")
    stream = body.stream_options
    return Options(
        include_usage=includes_usage(stream, loaded),
        continuous_usage=stream is not None and stream.continuous_usage_stats is True,
        logprobs=logprobs,
        token_ids=body.return_token_ids is True,
        cached=body.return_cached_tokens_details is True,
        routed=body.return_routed_experts is True,
    )


def includes_usage(stream: StreamOptions | None, loaded: Loaded) -> bool:
    """Whether a stream ends with its usage."""
    return loaded.defaults.usage or (stream is not None and stream.include_usage is True)


def spelling(body: Generation, loaded: Loaded) -> Namer:
    """How tokens are written in this request's log-probabilities."""
    asked = body.return_tokens_as_token_ids
    return Namer(loaded.tokenizer, loaded.defaults.tokens_as_ids if asked is None else asked)


def prompt_logprobs_wanted(body: Generation) -> int:
    """`prompt_logprobs` as the sampling parameter: -1 for none."""
    value = body.prompt_logprobs
    if value is None:
        return -1
    if value < 0:
        raise RequestError("'prompt_logprobs' must not be negative.", "prompt_logprobs")
    return value
