"""From a job to queued requests: encode, check, fill in what was left open."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Iterator
from math import inf

import msgspec
import numpy as np

from app.engine.adapters import Adapters
from app.engine.beam_search import BeamRun, check_width
from app.engine.failure import TIMED_OUT, failure
from app.engine.job import Job, Run, Sink
from app.engine.output import Stream
from app.engine.replicas import Replicas
from app.engine.run import LiveRun
from app.engine.timeline import JobKey, Timelines
from app.text.detokenizer import Detokenizer
from app.text.infill import encode_suffix, find_marks
from app.text.repetition import RepetitionScanner
from app.text.stops import StopScanner, check_stops
from app.text.tokenizer import Tokenizer
from app.warning import warn
from core.clock import Clock
from core.errors import Aborted, ContextExceeded, LoomError, RequestError, Unavailable, unsupported
from core.grammar import CompiledGrammar, GrammarCompiler, TokenRules
from core.request import Pinning, Request, SamplingParams
from core.request.params import SEED_LIMIT, check, check_starts
from core.stats import EngineStatistics
from core.types import Finish, FinishReason, Ints

MAX_CHOICES = 128
"""CVE-2026-34756 is a server that copies a request for each of an unbounded `n`."""

TAIL = 8
"""Prompt tokens shown to the detokenizer: enough for the leading-space rule of any tokenizer."""


class _Preparing:
    """A job that is being encoded and compiled, in the task that started it. Owner: event loop."""

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self.error: LoomError | None = None
        """The error that `Submitter.start` raises after an abort."""

    def abort(self, message: str | None = None) -> None:
        """Cancel the job before it is queued; with a `message` the client gets an error."""
        if self.error is None and self._task is not None:
            self.error = failure(Finish(FinishReason.ABORT, message=message)) or Aborted()
            self._task.cancel()

    def aborted(self) -> LoomError | None:
        """The error, where the task was cancelled by `abort`, and not by its client's disconnect too."""
        return self.error if self.error is not None and self._task and not self._task.uncancel() else None


class Submitter:
    """The engine's interface for HTTP.

    Owner: event loop.
    """

    def __init__(
        self,
        replicas: Replicas,
        tokenizer: Tokenizer,
        clock: Clock,
        grammars: GrammarCompiler | None = None,
        generates: bool = True,
        adapters: Adapters | None = None,
    ) -> None:
        """Without `grammars` constraints are refused. A model that `generates` no text runs prompts only.
        `adapters` None: jobs have none."""
        self._grammars = grammars
        self._generates = generates
        self._adapters = adapters or Adapters(replicas)
        self._replicas = replicas
        self._tokenizer = tokenizer
        self._limits = replicas.capabilities
        self._clock = clock
        self._rng = random.Random()  # from the system's once: a call for each request takes 4 µs
        self._runs: dict[JobKey, LiveRun | _Preparing] = {}
        self._draining = False
        self._timelines = Timelines(clock)

    async def start(self, job: Job, sink: Sink) -> Run:
        """See `app.engine.job.Generator.start`."""
        self._check_open(job)
        if not 1 <= job.n <= MAX_CHOICES:
            raise RequestError(f"n must be between 1 and {MAX_CHOICES}, got {job.n}.", "n")
        if job.max_tokens != 0 and not self._generates:
            raise RequestError("This model does not generate text.", "model", "unsupported_model")
        key = self._free_key(job)
        self._adapters.acquire(job.root.adapter)
        preparing = self._runs[key] = _Preparing()
        arrived = self._clock()
        in_time = self._expire(key, job.deadline - arrived)
        try:
            prompt = await self._encode(job)
            encoded = self._clock()
            grammar = await self._compile(job)
            pinning = await self._pinning(job, prompt)
            self._check_open(job)
            run = self._enqueue(job, prompt, grammar, pinning, sink)
        except BaseException as ended:
            if in_time is not None:
                in_time.cancel()
            del self._runs[key]
            self._adapters.release(job.root.adapter)
            if isinstance(ended, asyncio.CancelledError) and (error := preparing.aborted()) is not None:
                raise error from None
            raise
        self._runs[key] = run
        times = arrived, encoded - arrived, self._clock() - encoded
        self._timelines.open(key, run.engine.recorder, run.requests, *times)
        run.on_done(lambda: self._done(key, run, job.root.adapter, in_time))
        return run

    def _expire(self, key: JobKey, seconds: float) -> asyncio.TimerHandle | None:
        """End the job with this key after `seconds`. Returns the timer; None where there is no end."""
        if seconds == inf:
            return None

        def end() -> None:
            self._runs[key].abort(TIMED_OUT)

        return asyncio.get_running_loop().call_later(max(seconds, 0.0), end)

    def _done(self, key: JobKey, run: LiveRun, adapter: str, in_time: asyncio.TimerHandle | None) -> None:
        if in_time is not None:
            in_time.cancel()
        del self._runs[key]
        run.engine.recorder.job_ended(run.requests)
        self._adapters.release(adapter)
        self._timelines.close(key)

    def timeline(self, id: str, tenant: str = "") -> dict[str, object] | None:
        """Timings of a tenant's recent job; None when it is no longer known."""
        return self._timelines.of((tenant, id))

    def drain(self) -> None:
        """Refuse new jobs; those that run continue."""
        self._draining = True

    @property
    def idle(self) -> bool:
        return not self._runs and self._replicas.idle

    def abort(self, ids: Collection[str], tenant: str = "") -> int:
        """Abort all jobs of these requests of a tenant. Returns the number of aborted jobs. A request has a
        job for each prompt (`id-0`), and one for each answer that continues after its reasoning budget
        (`id-0-1`)."""
        wanted = frozenset(ids)
        runs = [
            run
            for (owner, name), run in self._runs.items()
            if owner == tenant and not wanted.isdisjoint(_requests(name))
        ]
        for run in runs:
            run.abort()
        return len(runs)

    def abort_all(self, message: str | None = None, tenant: str | None = None) -> int:
        """Abort all jobs, or a tenant's; returns their number. With a `message` clients get an error."""
        runs = [run for (owner, _), run in self._runs.items() if tenant in (None, owner)]
        for run in runs:
            run.abort(message)
        return len(runs)

    def flush(self) -> bool:
        """Empty the prefix cache; False, without effect, while requests run."""
        return self._replicas.flush()

    def statistics(self) -> list[EngineStatistics]:
        """Statistics of each replica."""
        return self._replicas.statistics()

    # -- one job -----------------------------------------------------------------------------------

    def _check_open(self, job: Job) -> None:
        if self._replicas.failure is not None:
            raise Unavailable(f"The engine has failed: {self._replicas.failure}")
        if self._draining and not job.continues:
            raise Unavailable("The server is shutting down.")

    def _free_key(self, job: Job) -> JobKey:
        """The job's own id where no other has it. Part of an answer under way (`id-1`) gets another number
        instead: a client that chose the same id must not end it."""
        id = job.id
        while (job.owner, id) in self._runs:
            if not job.continues:
                raise RequestError(f"A request with id {job.id!r} is already running.", "request_id")
            id += "-0"
        return job.owner, id

    async def _encode(self, job: Job) -> Ints:
        if isinstance(job.prompt, str):
            prompt = await encoded(job, self._tokenizer, self._limits.context_length)
        else:
            prompt = job.prompt
        if len(unknown := prompt[(prompt < 0) | (prompt >= self._limits.vocab_size)]):
            # A text may have one too: some tokenizers have more tokens than the model.
            token = int(unknown[0])
            named = f" ({self._tokenizer.token_name(token)})" if isinstance(job.prompt, str) else ""
            raise RequestError(
                f"'{job.prompt_param}' has token id {token}{named}; this model has ids 0 to "
                f"{self._limits.vocab_size - 1}.",
                job.prompt_param,
            )
        if job.truncate_prompt is not None:
            prompt = _shortened(prompt, job.truncate_prompt, job.truncate_end)
        if not len(prompt):
            raise RequestError("The prompt is empty: give at least one token.", job.prompt_param)
        return np.ascontiguousarray(prompt, np.int32)

    async def _compile(self, job: Job) -> CompiledGrammar | None:
        param = None if job.grammar is None else job.grammar.param
        if job.allowed_ids is not None or job.bad_words:
            param = "bad_words" if job.bad_words else "allowed_token_ids"
        if param is None:
            return None
        if self._grammars is None:
            raise unsupported(param, "this model's vocabulary cannot be constrained")
        grammar = None
        if job.grammar is not None:
            grammar = await self._grammars.compile(job.grammar)
            if grammar.warnings:
                warn(
                    f"'{job.grammar.param}' is not held to all of its schema: {', '.join(grammar.warnings)}."
                )
        if job.allowed_ids is None and not job.bad_words:
            return grammar
        rules = TokenRules(job.allowed_ids, await self._sequences(job.bad_words))
        return await self._grammars.restrict(grammar, rules, param)

    async def _sequences(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Each text as the tokens that it is at the start of a text and after a blank, as vLLM reads it.
        Other ways to spell the same are not excluded, and tokens that only the tokenizer has come from no
        model."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word.lstrip(), " " + word.lstrip()):
                ids = await self._tokenizer.encode_async(text, False, "bad_words")
                await asyncio.sleep(0)  # short texts are encoded at once: a long list would be one slice
                found[tuple(ids.tolist())] = None
        return tuple(ids for ids in found if ids and max(ids) < self._limits.vocab_size)

    async def _pinning(self, job: Job, prompt: Ints) -> Pinning | None:
        """The marks of `job.keep`, in tokens instead of characters."""
        if job.keep is None:
            return None
        marks = [(await self._tokens(job, prompt, at), seconds) for at, seconds in job.keep.marks]
        return Pinning(job.keep.owner, tuple(marks))

    async def _tokens(self, job: Job, prompt: Ints, characters: int | None) -> int:
        """About how many tokens the first `characters` of a text are: whole pages are kept, so one more
        or less at the cut matters little. The shorter side of it is encoded once more."""
        if characters is None or not isinstance(job.prompt, str):
            return len(prompt)
        before, after = job.prompt[:characters], job.prompt[characters:]
        if len(before) < len(after) and job.truncate_prompt is None:
            tokens = len(await self._tokenizer.encode_async(before, job.add_special_tokens))
        else:
            tokens = len(prompt) - len(await self._tokenizer.encode_async(after, False))
        return max(tokens, 0)

    def _enqueue(
        self, job: Job, prompt: Ints, grammar: CompiledGrammar | None, pinning: Pinning | None, sink: Sink
    ) -> LiveRun:
        sampling = self._complete(job, len(prompt))
        check(sampling, self._limits.vocab_size, self._limits.processors)
        check_starts(sampling, len(prompt))
        check_stops(job.text.stop, job.text.stop_regex, job.n)
        engine = self._replicas.choose(job, prompt)
        if job.beam is not None:
            check_width(job, self._limits.vocab_size)
            search = BeamRun(job, prompt, sampling, engine, sink)
            search.begin(self._stream, lambda: self._detokenizer(job, prompt), self._clock, pinning)
            return search
        run = LiveRun(job, prompt, sampling, engine, sink)
        now = self._clock()
        assert job.embeds is None or job.root.own, "equal placeholders are not equal prompts"
        for index in range(job.n):
            own = sampling
            if index:  # the prompt's log-probabilities are the same for every choice
                seed = (sampling.seed + index) % SEED_LIMIT
                own = msgspec.structs.replace(sampling, seed=seed, prompt_logprobs=-1)
            request = Request(
                f"{job.id}-{index}", prompt, own, arrival=now, priority=job.priority, root=job.root
            )
            request.caller, request.grammar, request.embeds = job.owner, grammar, job.embeds
            request.continues = job.resumes
            request.due = 0.0 if job.continues else job.due
            run.requests.append(request)
        run.requests[0].pinning = pinning  # its prompt is the others' too
        engine.add(run.requests, [self._stream(index, run, job) for index in range(job.n)])
        return run

    def _complete(self, job: Job, prompt_len: int) -> SamplingParams:
        """Fill in length, seed and end-of-sequence ids."""
        max_tokens = self._length(job, prompt_len)
        stop_ids, min_tokens = job.sampling.stop_ids, job.sampling.min_tokens
        if job.ignore_eos and job.grammar is not None and not stop_ids:
            # A complete grammar has no other token than the end: it is put off for as long as there is
            # another, and no longer.
            min_tokens = max_tokens
        if not job.ignore_eos or job.grammar is not None:
            stop_ids = stop_ids | self._tokenizer.eos_ids
        seed = self._rng.randrange(SEED_LIMIT) if job.seed is None else job.seed
        return msgspec.structs.replace(
            job.sampling, max_tokens=max_tokens, min_tokens=min_tokens, seed=seed, stop_ids=stop_ids
        )

    def _length(self, job: Job, prompt_len: int) -> int:
        """Tokens that the job may generate: `max_tokens`, or what the context leaves."""
        room = self._limits.context_length - prompt_len
        wanted = room if job.max_tokens is None else job.max_tokens
        if job.cut_to_fit or job.max_tokens is None:
            if room < 1:
                raise ContextExceeded(self._limits.context_length, prompt_len, 0, job.prompt_param)
            return min(wanted, room)
        if wanted > room:
            raise ContextExceeded(self._limits.context_length, prompt_len, wanted, job.prompt_param)
        return wanted

    def _stream(self, index: int, run: LiveRun, job: Job) -> Stream:
        detokenizer, text = self._detokenizer(job, run.prompt), job.text
        stops = None
        if text.stop or text.stop_regex:
            stops = StopScanner(text.stop, text.stop_regex, text.include_stop, job.sampling.min_tokens)
        repetition = None if text.repetition is None else RepetitionScanner(text.repetition)
        return Stream(index, run.sink, run.last, detokenizer, stops, repetition, job.single_tokens)

    def _detokenizer(self, job: Job, prompt: Ints) -> Detokenizer:
        tail = prompt[-TAIL:].tolist()
        return Detokenizer(self._tokenizer, tail, job.text.skip_special_tokens)


def _shortened(prompt: Ints, most: int, end: bool) -> Ints:
    """The last `most` tokens, or the first ones where the `end` is to go."""
    if len(prompt) <= most:
        return prompt
    return prompt[:most] if end else prompt[len(prompt) - most :]


async def encoded(job: Job, tokenizer: Tokenizer, context: int = 0) -> Ints:
    """A job's text, and its suffix where it has one, as ids. Raises `RequestError` where there are no
    marks, and for a text of far more than `context` tokens (0: none is too long) that is not to be cut."""
    assert isinstance(job.prompt, str)
    most = context if job.truncate_prompt is None else 0
    if not job.suffix:
        return await tokenizer.encode_async(job.prompt, job.add_special_tokens, job.prompt_param, most)
    marks = find_marks(tokenizer)
    if marks is None:
        raise unsupported("suffix", "this model's vocabulary has no marks for text insertion")
    # Encoded apart, and the marks by id: that is how the models were trained.
    begin = await tokenizer.encode_async("", job.add_special_tokens)
    before = await tokenizer.encode_async(job.prompt, False, job.prompt_param, most)
    after = await encode_suffix(job.suffix, marks.format, tokenizer, most)
    first, second = (marks.prefix, before), (marks.suffix, after)
    if marks.format.suffix_first:
        first, second = second, first
    parts = [begin, [first[0]], first[1], [second[0]], second[1]]
    if marks.middle is not None:
        parts.append([marks.middle])
    return np.concatenate([np.asarray(part, np.int32) for part in parts])


def _requests(job: str) -> Iterator[str]:
    """Return the ids of the requests that a job may belong to: its own id, and the id without each number at
    its end."""
    yield job
    head, dash, number = job.rpartition("-")
    while dash and number.isdecimal():
        yield head
        head, dash, number = head.rpartition("-")
