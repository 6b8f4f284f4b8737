"""A fake engine with scripted output: `app.engine.submit.Submitter` without a model.

It makes the same checks as the real one, so that errors name the same fields.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import msgspec
import numpy as np

from app.engine.job import DraftCounts, Job, Piece, Sink
from app.text.stops import check_stops
from core.clock import monotonic
from core.errors import ContextExceeded, LoomError, RequestError
from core.plan import PromptLogprobs, RowLogprobs, Support
from core.request import Pinning, Request, SamplingParams, State
from core.request.params import check, check_starts
from core.stats import CacheStatistics, EngineStatistics, Histogram, Histograms, SchedulerStatistics
from core.types import Finish, FinishReason, Floats, Ints
from tests.rigs.tokenizer import VOCAB, ByteTokenizer

CONTEXT = 512
WORDS = ("Hel", "lo", " wörld", " 😀", "!")
"""The default output of every choice, one token each, repeated until its length."""


def row(token: int, k: int) -> RowLogprobs:
    """Log-probabilities that identify their token."""
    ids = np.array([(token + i) % VOCAB for i in range(k)], np.int32)
    values = np.array([-float(i) for i in range(k)], np.float32)
    support = Support(np.array([token, token + 1], np.int32), -0.25)
    return RowLogprobs(-float(token) / 100, ids, values, float(token), support)


WIDTH = 4
"""Width of hidden states."""


def state(token: int, position: int) -> Floats:
    """A hidden state that identifies its token and position."""
    return np.array([token, position, 1.0, -1.0], np.float32)


ROUTED = (2, 3)
"""Layers, and experts of a token in each."""


def routed(token: int, position: int) -> Ints:
    """Routed experts that identify their token and position: [layers, experts per token]."""
    return np.array([[token, position, layer] for layer in range(ROUTED[0])], np.int32)


class FakeRun:
    """A job of the fake engine. Either the test or `speak` pushes pieces."""

    def __init__(
        self, engine: FakeEngine, job: Job, prompt: Ints, params: SamplingParams, sink: Sink
    ) -> None:
        self.engine = engine
        self.job = job
        self.prompt = prompt
        self.params = params
        self.requests = [Request(f"{job.id}-{i}", prompt, params) for i in range(job.n)]
        for request in self.requests:
            request.cached = engine.cached
            request.embeds = job.embeds
        if job.keep is not None:
            marks = [(len(prompt) if n is None else n, seconds) for n, seconds in job.keep.marks]
            kept = tuple(tokens for tokens, _ in marks)
            self.requests[0].pinning = Pinning(job.keep.owner, tuple(marks), kept)
        self.sink = sink
        self.open = set(range(job.n))
        self.done = asyncio.Event()
        self.aborted = False
        self.stopped: Finish | None = None
        self.ended: list[int] = []
        self.script: list[str] = []
        self.made: list[list[int]] = [[] for _ in range(job.n)]
        self.begun = False
        """Choice 0 has had a piece; prompt log-probabilities are known from then on."""

    @property
    def choices(self) -> int:
        return self.job.n

    @property
    def cached(self) -> int:
        return self.requests[0].cached

    @property
    def output_tokens(self) -> int:
        return sum(len(tokens) for tokens in self.made)

    @property
    def first_token_at(self) -> float:
        return self.requests[0].first_token_at

    @property
    def reasoning_tokens(self) -> int:
        return 0

    def drafts(self, index: int) -> DraftCounts | None:
        return self.engine.drafts

    def request(self, index: int) -> Request:
        return self.requests[index]

    def finish(self, index: int) -> Finish | None:
        return self.requests[index].finish

    def count(self, *states: State) -> int:
        return sum(request.state in states for request in self.requests)

    def kept(self, seconds: float) -> int:
        pinning = self.requests[0].pinning
        if pinning is None:
            return 0
        return max((tokens for tokens, asked in pinning.marks if asked == seconds), default=0)

    def prompt_logprobs(self) -> list[PromptLogprobs]:
        k, start = self.params.prompt_logprobs, max(self.params.prompt_logprobs_start, 1)
        if k < 0 or start >= len(self.prompt) or not self.begun:
            return []
        named = self.params.prompt_logprob_ids
        rows = [row(int(token), k) for token in self.prompt[start:]]
        top_ids = [[*r.top_ids, *named] for r in rows]
        top_values = [[*r.top_values, *(row(token, 0).chosen for token in named)] for r in rows]
        return [
            PromptLogprobs(
                start=start,
                values=np.array([r.chosen for r in rows], np.float32),
                ranks=np.arange(1, len(rows) + 1, dtype=np.int32),
                top_ids=np.array(top_ids, np.int32).reshape(len(rows), k + len(named)),
                top_values=np.array(top_values, np.float32).reshape(len(rows), k + len(named)),
            )
        ]

    def hidden(self, index: int) -> list[Floats]:
        tokens = [*self.prompt.tolist(), *self.made[index][:-1]]
        states = [state(token, at) for at, token in enumerate(tokens)]
        n = len(self.prompt)
        match self.params.hidden:
            case "none":
                return []
            case "first" | "last" if self.engine.head is not None:
                return [np.array([self.engine.head(self.prompt, self.params.pair)], np.float32)]
            case "first":
                return [states[0][None]]
            case "last":
                return [states[n - 1][None]]
            case "sum":  # in two chunks
                return [np.sum(part, axis=0)[None] for part in (states[: n // 2], states[n // 2 : n]) if part]
            case "output":
                return [each[None] for each in states[n - 1 :]]
            case "all":
                return [np.array(states[:n]), *(each[None] for each in states[n:])]

    def hidden_from(self, index: int) -> int:
        return len(self.prompt) - 1 if self.params.hidden in ("last", "output") else 0

    def experts(self, index: int) -> list[Ints]:
        if self.params.experts_from < 0:
            return []
        tokens = [*self.prompt.tolist(), *self.made[index][:-1]]
        every = [routed(token, at) for at, token in enumerate(tokens)][self.params.read_from :]
        return [np.array(each)[None] for each in every]

    async def wait(self) -> None:
        await self.done.wait()

    def abort(self) -> None:
        self.aborted = bool(self.open) or self.aborted
        self.stopped = Finish(FinishReason.ABORT)
        for index in sorted(self.open):
            self.push(index, Piece("", [], None, self.stopped))

    def end(self, index: int) -> None:
        self.ended.append(index)
        self.push(index, Piece("", [], None, Finish(FinishReason.ABORT)))

    def push(self, index: int, piece: Piece) -> None:
        """Deliver one piece, as the engine does."""
        if index not in self.open:
            return
        self.begun |= index == 0
        self.made[index] += piece.tokens
        request = self.requests[index]
        if piece.tokens and not request.first_token_at:
            request.first_token_at = monotonic()
        if piece.finish is not None:
            request.finish = piece.finish
            self.open.discard(index)
        self.sink(index, piece)
        if not self.open:
            self.done.set()
            self.engine.live.pop((self.job.owner, self.job.id), None)

    async def speak(self) -> None:
        """Generate all choices in lockstep, one word per iteration of the event loop."""
        limit = self.params.max_tokens
        if self.script:
            limit = len(self.script) if self.job.max_tokens is None else limit
        for at in range(max(limit, 1)):
            for index in sorted(self.open):
                self.push(index, self.piece(at, limit))
            await asyncio.sleep(0)

    def piece(self, at: int, limit: int) -> Piece:
        if limit == 0:
            return Piece("", [], None, Finish(FinishReason.LENGTH))
        if self.engine.fail_at == at:
            return Piece("", [], None, self.engine.failure)
        words = self.script or WORDS
        word = words[at % len(words)]
        token = word.encode()[0]
        count = max(self.params.logprobs, 0) + len(self.params.logprob_ids)
        logprobs = [row(token, count)] if self.params.wants_logprobs else None
        finish = None
        if self.job.text.stop and word == "!":
            finish = Finish(FinishReason.STOP, self.job.text.stop[0])
        elif self.script and at + 1 == len(self.script):
            finish = Finish(FinishReason.STOP)
        elif at + 1 == limit:
            finish = Finish(FinishReason.LENGTH)
        return Piece(word, [token], logprobs, finish)


class FakeEngine:
    """The fake engine. Owner: event loop."""

    def __init__(self) -> None:
        self.live: dict[tuple[str, str], FakeRun] = {}
        self.runs: list[FakeRun] = []
        self.refusal: LoomError | Exception | None = None
        """Raised by every start."""
        self.gate: asyncio.Event | None = None
        """If set, starts wait for it."""
        self.started = asyncio.Event()
        """Set when a start begins, before it waits for the gate."""
        self.manual = False
        """Generate nothing; the test pushes pieces."""
        self.fail_at = -1
        self.failure = Finish(FinishReason.ERROR, message="The device was lost.")
        self.scripts: list[list[str]] = []
        """Outputs of the next jobs: a token per piece, then stop."""
        self.cached = 0
        self.drafts: DraftCounts | None = None
        """Draft counts of every choice; None: the engine does not speculate."""
        self.head: Callable[[Ints, int], list[float]] | None = None
        """A fake classification head: from the prompt and the start of its second text to scores."""
        self.processors: tuple[str, ...] = ()
        """Names of logit processors that jobs may use."""
        self.flushed = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, job: Job, sink: Sink) -> FakeRun:
        self.started.set()
        if self.gate is not None:
            await self.gate.wait()
        if self.refusal is not None:
            raise self.refusal
        key = job.owner, job.id
        if key in self.live:
            raise RequestError(f"A request with id {job.id!r} is already running.", "request_id")
        run = FakeRun(self, job, *self._complete(job), sink)
        if self.scripts:
            run.script = self.scripts.pop(0)
        self.live[key] = run
        self.runs.append(run)
        if not self.manual:
            task = asyncio.get_running_loop().create_task(run.speak())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return run

    def _complete(self, job: Job) -> tuple[Ints, SamplingParams]:
        if isinstance(job.prompt, str):
            prompt = ByteTokenizer().encode(job.prompt, job.add_special_tokens)
        else:
            prompt = job.prompt
        if job.truncate_prompt is not None:
            prompt = prompt[-job.truncate_prompt :]
        room = CONTEXT - len(prompt)
        max_tokens = min(len(WORDS), room) if job.max_tokens is None else job.max_tokens
        if job.cut_to_fit and room > 0:
            max_tokens = min(max_tokens, room)
        if max_tokens > room or (job.max_tokens is None and room < 1):
            raise ContextExceeded(CONTEXT, len(prompt), max_tokens, job.prompt_param)
        seed = 7 if job.seed is None else job.seed
        params = msgspec.structs.replace(job.sampling, max_tokens=max_tokens, seed=seed)
        check(params, VOCAB, self.processors)
        check_starts(params, len(prompt))
        check_stops(job.text.stop, job.text.stop_regex, job.n)
        return prompt, params

    def abort(self, ids: Collection[str], tenant: str = "") -> int:
        runs = [
            run
            for (owner, name), run in self.live.items()
            if owner == tenant and (name in ids or name.rsplit("-", 1)[0] in ids)
        ]
        for run in runs:
            run.abort()
        return len(runs)

    def abort_all(self, message: str | None = None, tenant: str | None = None) -> int:
        runs = [run for (owner, _), run in self.live.items() if tenant in (None, owner)]
        for run in runs:
            run.abort()
        return len(runs)

    def flush(self) -> bool:
        if self.live:
            return False
        self.flushed += 1
        return True

    def timeline(self, id: str, tenant: str = "") -> dict[str, object] | None:
        return {"id": id} if id == "known" and not tenant else None

    def statistics(self) -> list[EngineStatistics]:
        histogram = Histogram((0.1, 1.0), [3, 2, 1], 4.5)
        cache = CacheStatistics(
            page_size=16,
            total=100,
            free=40,
            cached=35,
            protected=5,
            nodes=7,
            queried_tokens=1000,
            hit_tokens=250,
            evicted_pages=3,
        )
        scheduler = SchedulerStatistics(
            waiting=2,
            waiting_tokens=64,
            running=len(self.live),
            in_flight=1,
            steps=10,
            prompt_tokens=1000,
            cached_tokens=250,
            output_tokens=500,
            retractions=1,
            cache=cache,
        )
        whole = EngineStatistics(
            scheduler=scheduler,
            last_step_at=1.0,
            step_seconds=0.02,
            device_seconds=1.5,
            loop_lag=0.001,
            finished={"stop": 4, "length": 3, "abort": 1},
            stream_interval=1,
            output_rate=25.0,
            busy=0.75,
            histograms=Histograms(**dict.fromkeys(Histograms.__struct_fields__, histogram)),
        )
        return [whole]
