"""`/generate`, after SGLang: streamed text is cumulative, everything else is in `meta_info`."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec
from aiohttp import web

from app.http.body import decode, read_body
from app.http.completions import check_prompt
from app.http.delivery import Collector, Delivery, running
from app.http.keys import SERVICE
from app.http.logprobs import Entry, Namer, output_entries, prompt_entries
from app.http.refuse import refuse_unsupported
from app.http.reply import json_response
from app.http.sampling import choices, job_id, priority, ready, root_key, sampling_params, text_options
from app.http.schema import NATIVE, NativeBody, NativeSampling
from app.http.sse import EventStream
from app.job import Job, Piece, Run
from app.service import Loaded
from core.errors import RequestError
from core.types import Finish, FinishReason

DEFAULT_MAX_NEW_TOKENS = 128
"""SGLang's."""

_IN = "sampling_params."

_NAMES = {
    "max_tokens": "sampling_params.max_new_tokens",
    "min_tokens": "sampling_params.min_new_tokens",
    "seed": "sampling_params.sampling_seed",
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
    "prompt_logprobs_start": "logprob_start_len",
    "request_id": "rid",
}
"""What the engine calls a field, and what this route does."""

_encode = msgspec.json.Encoder().encode


async def generate(request: web.Request) -> web.StreamResponse:
    """One prompt gives one object; lists or n > 1 give a list of them."""
    body = decode(NATIVE, await read_body(request))
    loaded = ready(request.app[SERVICE], None)
    jobs = native_jobs(body, loaded)
    total = sum(job.n for job in jobs)
    single = total == 1 and _one_prompt(body)
    namer = Namer(loaded.tokenizer)
    try:
        if body.stream:
            delivery = Delivery(total)
            async with running(loaded.engine, jobs, delivery.take) as runs:
                frames = NativeFrames(body, Answers(body, jobs, runs, namer), total, single)
                async with EventStream(request) as stream:
                    await delivery.run(stream, frames, patient=_patient(jobs))
                return stream.response
        collector = Collector(total)
        async with running(loaded.engine, jobs, collector.take) as runs:
            pieces = await collector.collect(runs)
            answers = Answers(body, jobs, runs, namer)
            listed = [answers.of(index, piece) for index, piece in enumerate(pieces)]
            return json_response(listed[0] if single else listed)
    except RequestError as error:
        error.param = _renamed(error.param)
        raise


def _patient(jobs: Sequence[Job]) -> bool:
    return jobs[0].sampling.prompt_logprobs >= 0 and jobs[0].n > 1


def _renamed(param: str | None) -> str | None:
    if param in _NAMES:
        return _NAMES[param]
    return _IN + param if param in NativeSampling.__struct_fields__ else param


def native_jobs(body: NativeBody, loaded: Loaded) -> list[Job]:
    """One job per prompt."""
    refuse_unsupported(body)
    asked = body.sampling_params or NativeSampling()
    refuse_unsupported(asked, _IN)
    param, prompts = _prompts(body)
    n = choices(asked.n, len(prompts), _IN)
    ids = _ids(body.rid, len(prompts))
    vocab_size = loaded.card.vocab_size
    base = Job(
        id="",
        prompt="",
        sampling=sampling_params(
            asked, vocab_size, _IN, min_tokens=asked.min_new_tokens or 0, **_logprobs(body)
        ),
        text=text_options(asked),
        max_tokens=_max_new_tokens(asked),
        seed=asked.sampling_seed,
        n=n,
        ignore_eos=asked.ignore_eos is True,
        priority=priority(body.priority),
        root=root_key(body.cache_salt, body.extra_key),
    )
    jobs = []
    for i, prompt in enumerate(prompts):
        name = param if len(prompts) == 1 else f"{param}[{i}]"
        checked = check_prompt(prompt, vocab_size, name)
        jobs.append(msgspec.structs.replace(base, id=ids[i], prompt=checked, prompt_param=name))
    return jobs


def _max_new_tokens(asked: NativeSampling) -> int:
    value = DEFAULT_MAX_NEW_TOKENS if asked.max_new_tokens is None else asked.max_new_tokens
    if value < 0:
        raise RequestError(f"'{_IN}max_new_tokens' must not be negative.", _IN + "max_new_tokens")
    return value


def _prompts(body: NativeBody) -> tuple[str, list[str | list[int]]]:
    """The field that has the prompts, and the prompts."""
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("Give exactly one of 'text' and 'input_ids'.", "text")
    if body.text is not None:
        return "text", [body.text] if isinstance(body.text, str) else list(body.text) or [""]
    ids = body.input_ids or [[]]
    kind = type(ids[0])
    for i, item in enumerate(ids):
        if type(item) is not kind:
            raise RequestError("'input_ids' must not mix ids and lists.", f"input_ids[{i}]")
    return "input_ids", [ids] if kind is int else ids  # type: ignore[list-item,return-value]


def _one_prompt(body: NativeBody) -> bool:
    """The prompt was not sent in a list of prompts."""
    return isinstance(body.text, str) or (body.text is None and isinstance((body.input_ids or [0])[0], int))


def _ids(rid: str | list[str] | None, prompts: int) -> list[str]:
    if isinstance(rid, list):
        if len(rid) != prompts:
            raise RequestError(f"'rid' has {len(rid)} ids for {prompts} prompts.", "rid")
        return [job_id(one, secrets.token_hex(16)) for one in rid]
    base = job_id(rid, secrets.token_hex(16))
    return [base] if prompts == 1 else [f"{base}-{i}" for i in range(prompts)]


def _logprobs(body: NativeBody) -> dict[str, int]:
    if not body.return_logprob:
        return {}
    top = body.top_logprobs_num or 0
    start = -1 if body.logprob_start_len is None else body.logprob_start_len
    if top < 0:
        raise RequestError("'top_logprobs_num' must not be negative.", "top_logprobs_num")
    if start < -1:
        raise RequestError("'logprob_start_len' must be at least -1.", "logprob_start_len")
    if start == -1:
        return {"logprobs": top}
    return {"logprobs": top, "prompt_logprobs": top, "prompt_logprobs_start": start}


class Answers:
    """Builds the object of one choice from what it has produced. Owner: event loop."""

    __slots__ = ("_body", "_jobs", "_n", "_namer", "_runs")

    def __init__(self, body: NativeBody, jobs: Sequence[Job], runs: Sequence[Run], namer: Namer) -> None:
        self._body = body
        self._jobs = jobs
        self._runs = runs
        self._namer = namer
        self._n = jobs[0].n

    def of(self, index: int, piece: Piece) -> dict[str, object]:
        """`piece` is all of the choice."""
        meta = self.meta(index, len(piece.tokens), piece.finish)
        if self._body.return_logprob:
            meta |= self.output_logprobs(piece) | self.input_logprobs(index)
        return {"text": piece.text, "output_ids": piece.tokens, "meta_info": meta}

    def meta(self, index: int, tokens: int, finish: Finish | None) -> dict[str, object]:
        """`meta_info` without log-probabilities."""
        which, choice = divmod(index, self._n)
        run, job = self._runs[which], self._jobs[which]
        return {
            "id": job.id if self._n == 1 else f"{job.id}-{choice}",
            "finish_reason": None if finish is None else _finish(finish, tokens),
            "prompt_tokens": len(run.prompt),
            "completion_tokens": tokens,
            "cached_tokens": run.requests[0].cached,
        }

    def output_logprobs(self, piece: Piece) -> dict[str, list[object]]:
        """Of the piece's tokens."""
        return self._lists("output", list(output_entries(piece.tokens, piece.logprobs or ())))

    def input_logprobs(self, index: int) -> dict[str, list[object]]:
        """Of the prompt's tokens from `logprob_start_len` on, where asked for."""
        job, run = self._jobs[index // self._n], self._runs[index // self._n]
        if job.sampling.prompt_logprobs < 0:
            return {}
        return self._lists("input", prompt_entries(run, job.sampling.prompt_logprobs_start))

    def _lists(self, side: str, entries: list[Entry]) -> dict[str, list[object]]:
        fields: dict[str, list[object]] = {
            f"{side}_token_logprobs": [self._tuple(entry.value, entry.token) for entry in entries]
        }
        if self._body.top_logprobs_num:
            fields[f"{side}_top_logprobs"] = [self._top(entry) for entry in entries]
        return fields

    def _top(self, entry: Entry) -> list[object] | None:
        if entry.value is None:
            return None
        return [self._tuple(value, token) for token, value in entry.top]

    def _tuple(self, value: float | None, token: int) -> list[object]:
        return [value, token, self._namer.text(token) if self._body.return_text_in_logprobs else None]


def _finish(finish: Finish, tokens: int) -> dict[str, object]:
    if finish.reason is FinishReason.LENGTH:
        return {"type": "length", "length": tokens}
    if finish.reason is FinishReason.ABORT:
        return {"type": "abort", "message": finish.message or "Aborted"}
    return {"type": finish.reason.value, "matched": finish.matched}


class NativeFrames:
    """`Frames` of `/generate`: every event tells everything so far. Owner: event loop.

    Encoded pieces of a string or list, joined, are the encoded whole; so each piece is encoded once
    and only copied from then on. The prompt's log-probabilities are in the last event alone.
    """

    __slots__ = ("_answers", "_logprobs", "_single", "_texts", "_tokens", "_wanted")

    def __init__(self, body: NativeBody, answers: Answers, total: int, single: bool) -> None:
        self._answers = answers
        self._single = single
        self._wanted = body.return_logprob is True
        self._tokens: list[list[int]] = [[] for _ in range(total)]
        self._texts = [bytearray() for _ in range(total)]
        self._logprobs: list[dict[str, bytearray]] = [{} for _ in range(total)]

    def delta(self, index: int, piece: Piece) -> bytes | None:
        """See `Frames.delta`. A last piece waits for `finish`, which tells all of it."""
        self._tokens[index] += piece.tokens
        self._texts[index] += _encode(piece.text)[1:-1]
        if self._wanted and piece.logprobs:
            known = self._logprobs[index]
            for name, listed in self._answers.output_logprobs(piece).items():
                encoded = known.setdefault(name, bytearray())
                if encoded:
                    encoded += b","
                encoded += _encode(listed)[1:-1]
        return None if piece.finish is not None else self._event(index, None)

    def finish(self, index: int, finish: Finish) -> bytes:
        """See `Frames.finish`."""
        return self._event(index, finish)

    def tail(self) -> bytes | None:
        """Nothing: usage is in every event."""
        return None

    def _event(self, index: int, finish: Finish | None) -> bytes:
        tokens = self._tokens[index]
        meta = self._answers.meta(index, len(tokens), finish)
        if finish is not None and self._wanted:
            meta |= self._answers.input_logprobs(index)
        logprobs = b"".join(b',"%b":[%b]' % (k.encode(), bytes(v)) for k, v in self._logprobs[index].items())
        return b'data: {"text":"%b",%b"output_ids":%b,"meta_info":%b%b}}\n\n' % (
            bytes(self._texts[index]),
            b"" if self._single else b'"index":%d,' % index,
            _encode(tokens),
            _encode(meta)[:-1],
            logprobs,
        )
