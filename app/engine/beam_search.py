"""Beam search on the engine: one run for its client, many requests for the scheduler.

Every round runs each live beam as a request of one token with the log-probabilities of the best tokens.
The radix tree keeps the beams' prefixes, so that a round computes at most a page of each once more. They
queue like all others: the engine's limits on what runs and waits apply to them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.engine.job import Job, Piece, Sink
from app.engine.loop import Engine
from app.engine.output import Stream
from app.engine.run import LiveRun
from app.text.detokenizer import Detokenizer
from core.clock import Clock
from core.errors import Overloaded, Unavailable, field_error
from core.plan import RowLogprobs
from core.request import Pinning, Request, SamplingParams
from core.request.params import MAX_LOGPROBS
from core.request.request import State
from core.types import Finish, FinishReason, Ints

SLICE = 32
"""Tokens delivered in one go: under 0.3 ms of the loop."""
MADE = 8
"""Requests made in one go: each copies its beam's tokens, 25 µs where they are 100,000."""

_LOST = Finish(FinishReason.ERROR, message="The beam search failed.")


def check_width(job: Job, vocab_size: int) -> None:
    """Raise `RequestError` for a width that a round cannot report: it takes the best 2n tokens of a beam."""
    most = min(MAX_LOGPROBS, vocab_size) // 2
    if job.n > most:
        raise field_error("n", f"must be at most {most} with 'use_beam_search', got {job.n}")
    if job.max_tokens == 0:
        raise field_error("max_tokens", "must be at least 1 with 'use_beam_search'")


class BeamRun(LiveRun):
    """A search under way. Owner: event loop.

    `requests` are the choices as the client sees them: the engine never has them, and they count as
    running until the search ends.
    """

    def __init__(self, job: Job, prompt: Ints, sampling: SamplingParams, engine: Engine, sink: Sink) -> None:
        super().__init__(job, prompt, sampling, engine, sink)
        assert job.beam is not None
        self._job = job
        limit, ends = sampling.max_tokens, sampling.stop_ids
        self._beams = Beams(
            Rules(job.n, len(prompt), limit, job.beam.length_penalty, ends, sampling.logprobs)
        )
        self._queued: list[Request] = []
        self._rows: list[RowLogprobs | None] = []
        """Log-probabilities of this round, by beam."""
        self._waiting = 0
        """Number of beams whose token has not come yet."""
        self._round_over = asyncio.Event()
        self._failed: Finish | None = None
        self._over: set[int] = set()
        self.requests = [Request(f"{job.id}-{i}", prompt, sampling) for i in range(job.n)]

    def begin(
        self,
        stream: Callable[[int, LiveRun, Job], Stream],
        detokenizer: Callable[[], Detokenizer],
        clock: Clock,
        pinning: Pinning | None,
    ) -> None:
        """Queue the first round; the rest follows by itself. `stream` makes the stream of a choice. Raises
        `Overloaded`, with nothing queued."""
        self._stream, self._detokenizer, self._clock = stream, detokenizer, clock
        sampling = self.requests[0].params
        request = self._request(self.prompt, 0, prompt_logprobs=sampling.prompt_logprobs)
        request.pinning = self.requests[0].pinning = pinning
        request.due = self._job.due
        self.requests[0].prompt_logprobs = request.prompt_logprobs
        self._queue([request])
        for choice in self.requests:
            choice.arrival = request.arrival
            choice.move(State.PREFILL)
            choice.move(State.DECODE)
        self._task = asyncio.get_running_loop().create_task(self._search())

    # -- as a run ----------------------------------------------------------------------------------

    @property
    def output_tokens(self) -> int:
        """See `app.engine.job.Run.output_tokens`. Before the end, those of as many beams as there are
        choices."""
        return self._beams.rounds * self.choices if self._left else super().output_tokens

    def abort(self, message: str | None = None) -> None:
        """See `LiveRun.abort`."""
        if self.stopped is None:
            self.stopped = Finish(FinishReason.ABORT, message=message)
            for request in self._queued:
                self.engine.abort(request, self.stopped)

    def end(self, index: int) -> None:
        """See `app.engine.job.Run.end`. The rest of this choice is not delivered."""
        self._over.add(index)

    # -- the search --------------------------------------------------------------------------------

    async def _search(self) -> None:
        """Round by round, then the answer. However it ends, every choice gets its last piece."""
        finish, prompts = _LOST, [self.prompt]
        try:
            await self._round_over.wait()
            for choice in self.requests:
                choice.cached, choice.started_at = self._queued[0].cached, self._queued[0].started_at
                choice.first_token_at = self._queued[0].first_token_at
            while self._failed is None and self.stopped is None:
                self._beams.grow([row for row in self._rows if row is not None])
                if self._beams.finished:
                    await self._deliver(self._beams.best())
                    break
                prompts = await self._next(prompts)
                await self._round_over.wait()
            finish = self.stopped or self._failed or _LOST
        except (Overloaded, Unavailable) as error:
            finish = Finish(FinishReason.ABORT, message=str(error))
        finally:
            for index in range(len(self.requests)):
                self._close(index, finish)

    async def _next(self, prompts: Sequence[Ints]) -> list[Ints]:
        """Queue the live beams. Returns the tokens of each, its prompt included."""
        made, requests = [], []
        ran = self._clock() - self.requests[0].started_at
        for i, beam in enumerate(self._beams.live):
            if i % MADE == MADE - 1:
                await asyncio.sleep(0)
            made.append(np.append(prompts[beam.parent], np.int32(beam.token)))
            request = self._request(made[-1], i)
            request.continues, request.ran = True, ran
            requests.append(request)
        if self.stopped is None:
            self._queue(requests)
        return made

    def _request(self, prompt: Ints, index: int, prompt_logprobs: int = -1) -> Request:
        job, sampling = self._job, self.requests[0].params
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            logprobs=max(2 * job.n, sampling.logprobs),
            prompt_logprobs=prompt_logprobs,
        )
        id = f"{job.id}-{len(prompt) - len(self.prompt)}.{index}"
        made = Request(id, prompt, params, arrival=self._clock(), priority=job.priority, root=job.root)
        made.caller = job.owner
        return made

    def _queue(self, requests: list[Request]) -> None:
        self._round_over.clear()
        self._waiting = len(requests)
        self._rows = [None] * len(requests)
        streams = [Stream(i, self._take, self._take, self._detokenizer()) for i in range(len(requests))]
        self.engine.add(requests, streams)
        self._queued = requests  # not before: those that were refused cannot be aborted

    def _take(self, index: int, piece: Piece) -> None:
        """Take a beam's one token. Which one was sampled does not matter, only the log-probabilities do."""
        if piece.logprobs:
            self._rows[index] = piece.logprobs[0]
        if piece.finish is not None:
            if piece.finish.reason is not FinishReason.LENGTH:
                self._failed = piece.finish
            self._waiting -= 1
            if not self._waiting:
                self._round_over.set()

    # -- the answer --------------------------------------------------------------------------------

    async def _deliver(self, found: Iterable[Found]) -> None:
        """Every choice as if it had been generated token by token: parsers and counts see no difference."""
        assert self._job.beam is not None
        for index, each in enumerate(found):
            await asyncio.sleep(0)
            stream = self._stream(index, self, self._job)
            for at, (token, row) in enumerate(zip(each.tokens, each.rows, strict=True)):
                if self.stopped is not None or index in self._over:
                    break
                stream.feed([token], None if row is None else [row])
                if at % SLICE == SLICE - 1:
                    await asyncio.sleep(0)
            else:
                finish = Finish(FinishReason.LENGTH)
                last, row = None, None
                if each.end is not None:
                    finish = Finish(FinishReason.STOP, each.end.token)
                    if self._job.beam.include_end:
                        last, row = each.end.token, each.end.row
                self.requests[index].output = each.tokens + ([] if last is None else [last])
                self.requests[index].finish = finish
                stream.end(finish, last, row)

    def _close(self, index: int, finish: Finish) -> None:
        """Send the last piece of a choice that has not had it."""
        request = self.requests[index]
        if request.state is State.FINISHED:
            return
        request.move(State.FINISHED)
        if request.finish is None:
            request.finish = Finish(FinishReason.ABORT) if index in self._over else finish
            self.last(index, Piece("", [], None, request.finish))


class Rules(NamedTuple):
    """Parameters of a search. `prompt` and `limit` are in tokens: the prompt's, the most that follow."""

    width: int
    prompt: int
    limit: int
    penalty: float
    ends: frozenset[int]
    logprobs: int
    """Log-probabilities per token that the client wants, as `SamplingParams.logprobs`."""


class Live(NamedTuple):
    """A beam of this round: the beam of the last round that it continues (`parent`), the token that it adds,
    and its sum of log-probabilities with that."""

    parent: int
    token: int
    total: float
    row: RowLogprobs | None


class Ended(NamedTuple):
    """A beam that is complete: `last` continues beam `parent` of the round before `round`."""

    score: float
    round: int
    last: Live


class Found(NamedTuple):
    """One continuation. `end` is the end of text that follows `tokens`, None where the length ended it."""

    tokens: list[int]
    rows: list[RowLogprobs | None]
    end: Live | None


class Beams:
    """The search itself: rows of log-probabilities in, continuations out. Owner: event loop.

    Kept as one list of live beams per round, so that a round costs the same however long the beams are.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._rounds: list[list[Live]] = []
        self._ended: list[Ended] = []

    @property
    def live(self) -> list[Live]:
        """The beams to run next, best first."""
        return self._rounds[-1] if self._rounds else [Live(0, -1, 0.0, None)]

    @property
    def rounds(self) -> int:
        """Number of rounds that are over, which is the number of tokens of a live beam."""
        return len(self._rounds)

    @property
    def finished(self) -> bool:
        """Whether no further round would change what `best` says."""
        return len(self._rounds) == self._rules.limit or not self.live or self._settled()

    def grow(self, rows: Sequence[RowLogprobs]) -> None:
        """Make one round: `rows[i]` is what may follow live beam i. Ties go to the better beam, then to the
        token that the sampler ranks first."""
        rules, k = self._rules, 2 * self._rules.width
        sums = np.array([beam.total for beam in self.live])
        ids = np.stack([row.top_ids[:k] for row in rows])
        totals = sums[:, None] + np.stack([row.top_values[:k] for row in rows]).astype(np.float64)
        ends = np.isin(ids, list(rules.ends))
        ended = [self._beam(ids, totals, int(at), rows) for at in np.flatnonzero(ends)]
        order = np.argsort(-totals.ravel(), kind="stable")
        order = order[~ends.ravel()[order]][: rules.width]
        going = [self._beam(ids, totals, int(at), rows) for at in order]
        length = rules.prompt + len(self._rounds)
        done = [Ended(self._score(beam.total, length), len(self._rounds), beam) for beam in ended]
        self._ended = self._ranked(self._ended + done)
        self._rounds.append(going)

    def best(self) -> Iterator[Found]:
        """The complete beams and those that are left, best first; of equal ones those that were complete
        sooner. Each is put together when it is asked for: 64 of 8,000 tokens take 60 to 130 ms."""
        rules, last = self._rules, len(self._rounds) - 1
        length, live = rules.prompt + last + 1, self.live if last >= 0 else ()
        left = [Ended(self._score(beam.total, length), last, beam) for beam in live]
        return map(self._found, self._ranked(self._ended + left))

    def _ranked(self, ended: list[Ended]) -> list[Ended]:
        return sorted(ended, key=attrgetter("score"), reverse=True)[: self._rules.width]

    def _beam(self, ids: Ints, totals: NDArray[np.float64], at: int, rows: Sequence[RowLogprobs]) -> Live:
        parent, rank = divmod(at, ids.shape[1])
        row, count = None, self._rules.logprobs
        if count >= 0:  # a copy of what is reported: the whole row would be held otherwise
            of = rows[parent]
            row = RowLogprobs(
                float(of.top_values[rank]), of.top_ids[:count].copy(), of.top_values[:count].copy()
            )
        return Live(parent, int(ids[parent, rank]), float(totals[parent, rank]), row)

    def _score(self, total: float, length: int) -> float:
        score: float = total / length**self._rules.penalty
        return score

    def _settled(self) -> bool:
        """A live beam's sum can only fall, so its score is bounded by the length that suits it best: the
        longest one where a penalty above 0 divides by it."""
        rules = self._rules
        if len(self._ended) < rules.width:
            return False
        length = rules.prompt + (rules.limit if rules.penalty > 0 else len(self._rounds))
        return self._ended[-1].score >= self._score(self.live[0].total, length)

    def _found(self, ended: Ended) -> Found:
        end = ended.last if ended.last.token in self._rules.ends else None
        beam, path = ended.last, [ended.last]
        for round in reversed(self._rounds[: ended.round]):
            beam = round[beam.parent]
            path.append(beam)
        path.reverse()
        if end is not None:
            path.pop()
        return Found([each.token for each in path], [each.row for each in path], end)
