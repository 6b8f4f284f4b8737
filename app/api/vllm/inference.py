"""`/inference/v1/generate`, after vLLM: tokens in, tokens out. It takes the answers of `render`, and
`derender` takes its answers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal

import msgspec
from aiohttp import web

from app.api.openai.completions import completion_jobs
from app.api.openai.stream import DATA, END, includes_usage, spelling, usage
from app.api.request.beam import check_streamed
from app.api.request.logprobs import chat_logprobs, output_entries, vllm_prompt_logprobs
from app.api.request.reasoning import limited_thinking, thinking_budget
from app.api.request.routing import Routes
from app.api.request.sampling import request_id, stream_interval
from app.api.request.schema import CompletionBody, Int, StreamOptions
from app.engine.job import Job, Piece, Run
from app.http.answer import AnswerSpec, answer
from app.http.aside import aside, prompt_count
from app.http.delivery import Frames
from app.http.reply import encode_long
from app.service import Loaded
from core.errors import RequestError, field_error

ROUTES = Routes()

_encode = msgspec.json.Encoder().encode


class InferenceBody(msgspec.Struct, kw_only=True):
    """`sampling_params` has the fields of `/v1/completions`."""

    request_id: str | None = None
    model: str | None = None
    token_ids: list[Int] | None = None
    timeout: float | None = None
    sampling_params: CompletionBody | None = None
    output_mode: Literal["tokens", "text"] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: Int | None = None
    return_token_ids: bool | None = None
    features: Any = None
    content_parts: Any = None


_NAMES = {
    **{
        name: f"sampling_params.{name}"
        for name in CompletionBody.__struct_fields__
        if name not in InferenceBody.__struct_fields__
    },
    "prompt": "token_ids",
}
"""Fields of completions and ours, as `fields_named` takes them."""


@ROUTES.post(
    InferenceBody,
    "/inference/v1/generate",
    needed="token_ids",
    has="request_id choices usage",
    names=_NAMES,
    streams=True,
)
async def inference(request: web.Request, body: InferenceBody, loaded: Loaded) -> web.StreamResponse:
    """Go on from tokens, with tokens."""
    completion = _completion(body)
    id = request_id(completion, "gen")
    (job,) = await aside(prompt_count(completion.prompt), lambda: completion_jobs(completion, id, loaded))
    check_streamed(job, body.stream)
    if (body.sampling_params or completion).max_tokens is None:
        job = msgspec.structs.replace(job, max_tokens=None)
    spec = AnswerSpec(
        engine=limited_thinking(loaded, thinking_budget(completion, loaded)),
        jobs=[job],
        frames=partial(TokenFrames, body, job, loaded),
        every=stream_interval(completion),
        prompt_logprobs=False,
    )
    return await answer(request, spec, body.stream is True)


def _completion(body: InferenceBody) -> CompletionBody:
    """The request as a body of `/v1/completions`."""
    for name in ("return_entropy", "return_sampling_mask", "return_routed_experts"):
        if body.sampling_params is not None and getattr(body.sampling_params, name):
            raise RequestError(
                f"'{name}' is not supported here: /generate has it.", f"sampling_params.{name}", "unsupported"
            )
    for name in ("features", "content_parts"):
        if getattr(body, name):
            raise field_error(name, "is not supported: this model takes text only", "unsupported")
    return msgspec.structs.replace(
        body.sampling_params or CompletionBody(),
        prompt=list(body.token_ids or ()),
        echo=None,
        stream=None,
        return_hidden_states=None,
        rid=None,
        request_id=body.request_id,
        cache_salt=body.cache_salt,
        priority=body.priority,
    )


class TokenFrames(Frames[dict[str, object]]):
    """`Frames` of this route. Owner: event loop."""

    def __init__(self, body: InferenceBody, job: Job, loaded: Loaded, runs: Sequence[Run]) -> None:
        self._job = job
        self._runs = runs
        self._model = loaded.card.name
        self._body = body
        self._text = body.output_mode == "text"
        self._namer = spelling(body.sampling_params or CompletionBody(), loaded)
        self._usage = includes_usage(body.stream_options, loaded)
        self._count = 0
        self._first = True

    def whole(self, pieces: Sequence[Piece]) -> dict[str, object]:
        """See `Frames.whole`."""
        runs, tokens = self._runs, sum(len(piece.tokens) for piece in pieces)
        prompt = vllm_prompt_logprobs(runs[0], self._namer) if runs[0].params.prompt_logprobs >= 0 else None
        return {
            "request_id": self._job.id,
            "model": self._model,
            "created": int(time.time()),
            "output_mode": self._mode,
            "choices": [self._choice(index, piece) for index, piece in enumerate(pieces)],
            "prompt_logprobs": prompt,
            **self._prompt(),
            "usage": usage(runs, tokens),
            "kv_transfer_params": None,
        }

    @property
    def _mode(self) -> str:
        """`output_mode`."""
        return "text" if self._text else "tokens"

    def _choice(self, index: int, piece: Piece) -> dict[str, object]:
        """One choice's tokens, and its text if requested."""
        choice: dict[str, object] = {"index": index, "token_ids": piece.tokens, "logprobs": None}
        if piece.logprobs is not None:
            choice["logprobs"] = chat_logprobs(piece, self._namer) if self._text else _logprobs(piece)
        finish = piece.finish
        choice["finish_reason"] = None if finish is None else finish.reason.value
        return choice | ({"text": piece.text} if self._text else {})

    def _prompt(self) -> dict[str, object]:
        """The prompt's tokens, if requested."""
        return {"prompt_token_ids": self._runs[0].prompt.tolist()} if self._body.return_token_ids else {}

    def delta(self, index: int, piece: Piece) -> bytes | None:
        """See `Frames.delta`."""
        self._count += len(piece.tokens)
        if not piece.tokens and not (self._text and piece.text):
            return None
        said = msgspec.structs.replace(piece, finish=None)
        return self._event([self._choice(index, said)])

    def finish(self, index: int, piece: Piece) -> bytes:
        """See `Frames.finish`."""
        return self._event([self._choice(index, Piece("", [], None, piece.finish))])

    def rest(self) -> Iterator[bytes]:
        """See `Frames.rest`."""
        if self._usage:
            yield self._event([], usage=usage(self._runs, self._count))

    def _event(self, choices: list[dict[str, object]], **more: object) -> bytes:
        if self._first:
            more, self._first = {**self._prompt(), **more}, False
        event = {"request_id": self._job.id, "output_mode": self._mode, "choices": choices, **more}
        return DATA + encode_long(event) + END


def _logprobs(piece: Piece) -> dict[str, object]:
    """Log-probabilities of the piece's tokens, which are named by their ids alone."""
    content = [
        {
            "token_id": entry.token,
            "logprob": entry.value,
            "top_logprobs": [{"token_id": token, "logprob": value} for token, value in entry.top],
        }
        for entry in output_entries(piece.tokens, piece.logprobs or ())
    ]
    return {"content": content}
