"""`/v1/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

import msgspec
from aiohttp import web

from app.api.openai.common import base_job, check_stream_fields, logprob_count
from app.api.openai.stream import Chunks, GenerationRequest
from app.api.request.embeds import embedded, prompt_embeds
from app.api.request.logprobs import CompletionLogprobs, prompt_entries, vllm_prompt_logprobs
from app.api.request.prompts import check_prompt, split_prompts
from app.api.request.reasoning import limited_thinking, thinking_budget
from app.api.request.routing import CHOICES, Routes
from app.api.request.sampling import choices, request_id, stream_interval
from app.api.request.schema import CompletionBody, refuse, refuse_unsupported
from app.engine.job import Job, Piece, Run
from app.http.answer import AnswerSpec, answer, whole_answer
from app.http.aside import aside, prompt_count
from app.service import Loaded
from app.text.infill import find_marks
from core.errors import field_error, unsupported
from core.types import Floats

ROUTES = Routes()

P = TypeVar("P")

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default, which other servers copied."""

_TAKES = ("use_beam_search", "suffix", "lora_path")

_BESIDE_SUFFIX = {
    "truncate_prompt_tokens": "truncation would remove the marks around the text",
    "thinking_token_budget": "text is inserted without thinking",
    "max_thinking_tokens": "text is inserted without thinking",
    "prompt_embeds": "prompts must be texts",
}
"""Fields that `suffix` excludes, with the reason."""


class CompletionFrames(Chunks):
    """`Frames` of `/v1/completions`: text, after the prompt itself when echoed."""

    __slots__ = ("_body", "_echoed", "_echoes", "_logprobs", "_n")

    opening = b'"text":'
    empty: ClassVar[Mapping[str, object]] = {"text": ""}

    def __init__(self, request: GenerationRequest, runs: Sequence[Run]) -> None:
        super().__init__(request, runs)
        body = request.body
        assert isinstance(body, CompletionBody)
        self._body = body
        self._echoes = _echoes(body, request.jobs, runs, request.loaded)
        """The prompts as text, if they are returned."""
        self._n = runs[0].choices
        skips = body.skip_special_tokens is not False
        self._logprobs = [CompletionLogprobs(self._namer, skips) for _ in self._begun]
        self._echoed = [not body.echo] * len(self._begun)
        """Whether the prompt's log-probabilities have been sent."""

    def parts(self, index: int, piece: Piece, begins: bool) -> list[dict[str, object]]:
        """See `Chunks.parts`."""
        text = self._echo(index) + piece.text if begins else piece.text
        # Nothing generated, as with max_tokens 0: the last chunk is enough.
        return [{"text": text}] if text or (piece.tokens and (begins or self._rich)) else []

    def content(self, index: int, piece: Piece) -> dict[str, object]:
        """See `Chunks.content`."""
        return {"text": self._echo(index) + piece.text}

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._n] if self._body.echo else ""

    def logprobs(self, index: int, piece: Piece) -> object:
        """See `Chunks.logprobs`. They come after the prompt's when it is echoed."""
        if self._echoed[index]:
            return self._logprobs[index].of(piece)
        self._echoed[index] = True
        which = index // self._n
        return self._logprobs[index].of(piece, prompt_entries(self._runs[which]), self._echoes[which])

    def choice_fields(self, index: int) -> dict[str, object]:
        """See `Chunks.choice_fields`: choices are of several prompts."""
        which = index // self._n
        run, job = self._runs[which], self._request.jobs[which]
        fields: dict[str, object] = {}
        if self._body.return_token_ids or self._body.return_prompt_token_ids:
            fields["prompt_token_ids"] = run.prompt.tolist() if job.embeds is None else None
        if self._body.return_prompt_text:
            fields["prompt_text"] = self._echoes[which]
        if self._body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = vllm_prompt_logprobs(run, self._namer)
        return fields


@ROUTES.post(CompletionBody, "/v1/completions", example="prompt", has=CHOICES, streams=True)
async def completions(request: web.Request, body: CompletionBody, loaded: Loaded) -> web.StreamResponse:
    """Continue a text. Several prompts run side by side; choices are numbered prompt by prompt."""
    return await answer(request, await _spec(body, loaded), body.stream is True)


async def completion_answer(body: CompletionBody, loaded: Loaded) -> dict[str, Any]:
    """The whole answer, for batches and `app.offline`."""
    loaded.card.check_task("generate")
    return await whole_answer(await _spec(body, loaded))


async def _spec(body: CompletionBody, loaded: Loaded) -> AnswerSpec[dict[str, Any]]:
    id = request_id(body, "cmpl")
    embeds = await prompt_embeds(body, loaded)
    jobs = await aside(prompt_count(body.prompt), lambda: completion_jobs(body, id, loaded, embeds))
    check_stream_fields(body)
    request = GenerationRequest(body=body, loaded=loaded, jobs=jobs, id=id, object="text_completion")
    return AnswerSpec(
        engine=limited_thinking(loaded, thinking_budget(body, loaded)),
        jobs=jobs,
        frames=partial(CompletionFrames, request),
        every=stream_interval(body),
    )


def completion_jobs(
    body: CompletionBody, id: str, loaded: Loaded, embeds: Sequence[Floats] = ()
) -> list[Job]:
    """One job per prompt, everything checked that can be checked without tokens. `embeds` are those of
    `prompt_embeds`, where the route takes them: vLLM's order has them first."""
    refuse_unsupported(body, takes=(*_TAKES, "prompt_embeds") if embeds else _TAKES)
    if not body.prompt and not embeds:
        raise field_error("prompt", "must not be empty")
    prompts = split_prompts(body.prompt, "prompt")[0] if body.prompt else []
    n = choices(body.n, len(prompts) + len(embeds))
    if body.best_of not in (None, n):
        raise unsupported("best_of", f"all {n} of 'n' are returned, and no others are made")
    vocab_size = loaded.card.vocab_size
    logprobs = logprob_count(body.logprobs, "logprobs")
    base = base_job(
        body,
        loaded,
        id=id,
        n=n,
        max_tokens=_max_tokens(body),
        logprobs=logprobs,
        prompt_logprobs=logprobs if body.echo else -1,
    )
    base = _with_suffix(base, body, prompts, loaded)
    jobs = [embedded(base, rows, param) for param, rows in _named("prompt_embeds", embeds)]
    for param, prompt in _named("prompt", prompts):
        checked = check_prompt(prompt, vocab_size, param)
        special = body.add_special_tokens is not False
        jobs.append(
            msgspec.structs.replace(base, prompt=checked, prompt_param=param, add_special_tokens=special)
        )
    if len(jobs) == 1:
        return jobs
    return [msgspec.structs.replace(job, id=f"{id}-{i}") for i, job in enumerate(jobs)]


def _with_suffix(job: Job, body: CompletionBody, prompts: Sequence[object], loaded: Loaded) -> Job:
    """The job with its suffix, where the body has one, and the tokens that end such a text as stop ids.
    Raises `RequestError` where the model or the rest of the body cannot have it."""
    if not body.suffix:
        return job
    marks = find_marks(loaded.tokenizer)
    if marks is None or max(marks.ends) >= loaded.card.vocab_size:  # some tokenizers know more than the model
        raise unsupported("suffix", "this model's vocabulary has no marks for text insertion")
    refuse(body, _BESIDE_SUFFIX, "suffix")
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise field_error("suffix", "needs a 'prompt' that is text, not token ids")
    stops = job.sampling.stop_ids if job.ignore_eos else job.sampling.stop_ids | marks.ends
    sampling = msgspec.structs.replace(job.sampling, stop_ids=stops)
    return msgspec.structs.replace(job, suffix=body.suffix, sampling=sampling)


def _named(param: str, prompts: Sequence[P]) -> list[tuple[str, P]]:
    """Prompts with the path that an error about them names."""
    if len(prompts) == 1:
        return [(param, prompts[0])]
    return [(f"{param}[{i}]", prompt) for i, prompt in enumerate(prompts)]


def _max_tokens(body: CompletionBody) -> int:
    value = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if value < 0 or (value == 0 and not body.echo):
        raise field_error("max_tokens", f"must be at least 1 (0 with 'echo'), got {value}")
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
