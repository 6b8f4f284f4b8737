"""What the two OpenAI routes do alike."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from aiohttp import web

from app.api.openai.stream import DATA, END, Chunks, Envelope, Options, Shape, cached_details
from app.api.request.experts import experts
from app.api.request.logprobs import Namer, output_entries, told_lists
from app.api.request.sampling import job_id
from app.api.request.schema import ChatBody, CompletionBody, Generation, StreamOptions
from app.api.sglang.answer import meta_info
from app.engine.job import Piece, Run
from app.http.delivery import Delivery, prompt_weight
from app.http.reply import pieces
from app.http.sse import EventStream
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


def with_extras(
    answer: dict[str, object],
    body: ChatBody | CompletionBody,
    runs: Sequence[Run],
    pieces: Sequence[Piece],
) -> dict[str, object]:
    """The whole answer with what SGLang's clients asked for besides: `meta_info` of every choice, where
    cached tokens came from, which experts were chosen."""
    params = runs[0].requests[0].params
    sglext = cached_details(runs) if body.return_cached_tokens_details else {}
    if body.return_routed_experts and not body.return_meta_info:
        sglext["routed_experts"] = experts(runs[0], 0, len(pieces[0].tokens))
    if sglext:
        answer["sglext"] = sglext
    if body.return_meta_info:
        listed: Any = answer["choices"]
        each = len(pieces) // len(runs)
        for index, (choice, piece) in enumerate(zip(listed, pieces, strict=True)):
            which, own = divmod(index, each)
            meta = meta_info(str(answer["id"]), runs[which], len(piece.tokens), piece.finish)
            if params.logprobs >= 0 and piece.logprobs is not None:
                entries = output_entries(piece.tokens, piece.logprobs)
                meta["output_token_logprobs"] = [[entry.value, entry.token, None] for entry in entries]
            meta |= told_lists(params, piece.logprobs or ())
            if body.return_routed_experts:
                meta["routed_experts"] = experts(runs[which], own, len(piece.tokens))
            choice["meta_info"] = meta
    return answer


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
    envelope, _, told = chunks
    async with EventStream(request) as stream:
        await delivery.run(stream, frames, patient, routed_chunk(envelope, told, runs), prompt_weight(runs))
    return stream.response


def routed_chunk(envelope: Envelope, told: Options, runs: Sequence[Run]) -> Iterator[bytes]:
    """The chunk of `sglext`, in pieces: nothing where nobody asked. Begun when all choices have ended."""
    if told.routed:
        more = cached_details(runs) if told.cached else {}
        yield DATA + envelope.open() + b',"choices":[],"sglext":'
        yield from pieces({**more, "routed_experts": experts(runs[0], 0) or b""})
        yield b"}" + END
