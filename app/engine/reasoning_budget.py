"""Runs whose text is parsed on the way out, once for all dialects: pieces get events (reasoning, calls,
content), reasoning is counted and cut, a second call ends them.

The engine knows tokens and stops, not reasoning. When reasoning has used up its budget its request is
ended, and another one continues from prompt, reasoning and end mark; the radix tree makes that
nearly free, and the client sees one answer.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec
import numpy as np

from app.engine.failure import UNREADABLE, failure
from app.engine.job import DraftCounts, Generator, Job, Piece, Run, Sink
from app.parsers.reading import Reading
from app.text.tokenizer import Tokenizer
from core.errors import Aborted, ContextExceeded, LoomError, TimedOut, Unavailable
from core.grammar import GrammarSpec
from core.plan import PromptLogprobs, RowLogprobs, Support
from core.request import Request, State
from core.request.params import SEED_LIMIT
from core.types import NO_TOKENS, Finish, FinishReason, Floats, Ints

_ENOUGH = Finish(FinishReason.STOP)
_UNREADABLE = Finish(FinishReason.ERROR, message=UNREADABLE)

log = logging.getLogger(__name__)


class Watch(msgspec.Struct, frozen=True, kw_only=True):
    """How to parse a job's choices, and when to cut their reasoning."""

    reading: Reading
    budget: int | None = None
    """Reasoning tokens, at least 1; None: no bound."""
    after: GrammarSpec | None = None
    """The constraint of what follows reasoning that was cut."""

    @property
    def closing(self) -> str:
        """The end of reasoning that was cut, as the model would have written it."""
        family = self.reading.reasoning
        return "" if family is None else family.closing(self.reading.calls_in_channels)


def watched(engine: Generator, encoder: Tokenizer, watch: Watch) -> Generator:
    """`engine`, with parsing where there is something to parse."""
    return engine if watch.reading.plain else Watcher(engine, encoder, watch)


class Watcher:
    """A `Generator` over another. Owner: event loop."""

    def __init__(self, engine: Generator, encoder: Tokenizer, watch: Watch) -> None:
        self._engine = engine
        self._encoder = encoder
        self.watch = watch

    async def start(self, job: Job, sink: Sink) -> Run:
        """See `Generator.start`."""
        job = msgspec.structs.replace(job, single_tokens=True)
        run = WatchedRun(job, sink, self)
        run.begin(await self._engine.start(job, run.take))
        return run

    async def go_on(self, job: Job, index: int, thought: list[int], take: Sink) -> Run | None:
        """End the reasoning of a choice and start what follows. None when there is no room left."""
        closing = self.watch.closing
        mark = await self._encoder.encode_async(closing, False)
        ids: list[int] = mark.tolist()
        used = len(thought) + len(ids)
        left = None if job.max_tokens is None else job.max_tokens - used
        if left is not None and left < 0:  # not even for the mark
            return None
        take(index, Piece(closing, ids, [_sure(id) for id in ids] if job.sampling.wants_logprobs else None))
        if left == 0:
            return None
        assert isinstance(job.prompt, np.ndarray)
        following = msgspec.structs.replace(
            job,
            prompt=np.concatenate([job.prompt, np.asarray(thought, np.int32), mark]),
            sampling=msgspec.structs.replace(
                job.sampling, min_tokens=max(job.sampling.min_tokens - used, 0), prompt_logprobs=-1
            ),
            max_tokens=left,
            n=1,
            seed=None if job.seed is None else (job.seed + index) % SEED_LIMIT,
            truncate_prompt=None,
            keep=None,
            continues=True,
            resumes=True,
            grammar=self.watch.after,
        )
        try:
            return await self._engine.start(following, lambda _, piece: take(index, piece))
        except ContextExceeded:
            return None


def _sure(token: int) -> RowLogprobs:
    """Log-probabilities of a token that was inserted, not sampled: its probability is 1."""
    alone = Support(np.array([token], np.int32), 0.0)
    return RowLogprobs(0.0, NO_TOKENS, np.zeros(0, np.float32), 0.0, alone)


class WatchedRun:
    """A `Run` that may become another one on the way. Owner: event loop."""

    def __init__(self, job: Job, sink: Sink, watcher: Watcher) -> None:
        self._job = job
        self._sink = sink
        self._watcher = watcher
        self._choices = [Choice(watcher.watch) for _ in range(job.n)]
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._left = job.n
        self._done = asyncio.Event()

    # -- as a run ----------------------------------------------------------------------------------

    def begin(self, first: Run) -> None:
        """`first` runs; its pieces come to `take`, from the next turn of the loop on."""
        self._first = first
        self.prompt, self.params, self.choices = first.prompt, first.params, first.choices

    @property
    def cached(self) -> int:
        """See `app.engine.job.Run.cached`."""
        return self._first.cached

    @property
    def output_tokens(self) -> int:
        """See `app.engine.job.Run.output_tokens`. Both requests count where reasoning was cut."""
        seconds = (choice.second.output_tokens for choice in self._choices if choice.second is not None)
        return self._first.output_tokens + sum(seconds)

    @property
    def first_token_at(self) -> float:
        """See `app.engine.job.Run.first_token_at`."""
        return self._first.first_token_at

    @property
    def reasoning_tokens(self) -> int:
        """See `app.engine.job.Run.reasoning_tokens`."""
        return sum(choice.reasoning for choice in self._choices)

    def drafts(self, index: int) -> DraftCounts | None:
        """See `app.engine.job.Run.drafts`. Both requests count where reasoning was cut."""
        first, second = self._first.drafts(index), self._choices[index].second
        after = None if second is None else second.drafts(0)
        if first is None or after is None:
            return first
        return DraftCounts(*map(sum, zip(first, after, strict=True)))

    def request(self, index: int) -> Request:
        """See `app.engine.job.Run.request`."""
        return self._first.request(index)

    def finish(self, index: int) -> Finish | None:
        """See `app.engine.job.Run.finish`."""
        return self._choices[index].finish

    def count(self, *states: State) -> int:
        """See `app.engine.job.Run.count`."""
        seconds = (choice.second.count(*states) for choice in self._choices if choice.second is not None)
        return self._first.count(*states) + sum(seconds)

    def kept(self, seconds: float) -> int:
        """See `app.engine.job.Run.kept`."""
        return self._first.kept(seconds)

    def prompt_logprobs(self) -> list[PromptLogprobs]:
        """See `app.engine.job.Run.prompt_logprobs`."""
        return self._first.prompt_logprobs()

    def hidden(self, index: int) -> list[Floats]:
        """See `app.engine.job.Run.hidden`. The request after a cut reads all before it once more."""
        second = self._choices[index].second
        return self._first.hidden(index) if second is None else second.hidden(0)

    def hidden_from(self, index: int) -> int:
        """See `app.engine.job.Run.hidden_from`."""
        second = self._choices[index].second
        return self._first.hidden_from(index) if second is None else second.hidden_from(0)

    def experts(self, index: int) -> list[Ints]:
        """See `app.engine.job.Run.experts`. The request after a cut reads all before it once more."""
        second = self._choices[index].second
        return self._first.experts(index) if second is None else second.experts(0)

    @property
    def stopped(self) -> Finish | None:
        """See `app.engine.job.Run.stopped`."""
        return self._first.stopped

    async def wait(self) -> None:
        await self._done.wait()

    def abort(self) -> None:
        """See `app.engine.job.Run.abort`."""
        self._first.abort()
        while self._tasks:
            index, task = self._tasks.popitem()
            task.cancel()
            self._finish(index, Finish(FinishReason.ABORT))
        for choice in self._choices:
            if choice.second is not None:
                choice.second.abort()

    def end(self, index: int) -> None:
        """See `app.engine.job.Run.end`."""
        choice = self._choices[index]
        if choice.second is not None:
            choice.second.end(0)
        else:
            self._first.end(index)

    # -- pieces ------------------------------------------------------------------------------------

    def take(self, index: int, piece: Piece) -> None:
        """The sink of every request underneath."""
        choice = self._choices[index]
        if choice.cut:
            self._after_cut(index, choice, piece)
        elif choice.over is not None:
            if piece.finish is not None:
                self._finish(index, choice.over)
        else:
            self._give(index, choice.see(piece))
            if choice.ends and piece.finish is None:
                self.end(index)

    def _finish(self, index: int, finish: Finish) -> None:
        """End a choice with what its parser has held back."""
        self._give(index, self._choices[index].see(Piece("", [], None, finish)))

    def _after_cut(self, index: int, choice: Choice, piece: Piece) -> None:
        """The request that passed its budget is ending; what it still produces is dropped."""
        if piece.finish is None:
            return
        choice.cut = False
        if failure(piece.finish) is not None:
            self._finish(index, piece.finish)
            return
        task = asyncio.get_running_loop().create_task(self._continue(index, choice))
        self._tasks[index] = task

    async def _continue(self, index: int, choice: Choice) -> None:
        if self.stopped is not None:  # before or after the cut had ended the request
            del self._tasks[index]
            self._finish(index, self.stopped)
            return
        id = self._job.id if self._job.n == 1 else f"{self._job.id}-{index}"
        job = msgspec.structs.replace(self._job, id=id, prompt=self.prompt)
        finish = Finish(FinishReason.ERROR, message="The answer could not be continued after its reasoning.")
        try:
            choice.second = await self._watcher.go_on(job, index, choice.thought, self.take)
            finish = Finish(FinishReason.LENGTH)
        except Aborted:
            finish = Finish(FinishReason.ABORT)
        except (TimedOut, Unavailable) as error:
            finish = Finish(FinishReason.ABORT, message=str(error))
        except LoomError as error:
            finish = Finish(FinishReason.ERROR, message=str(error))
        finally:
            choice.thought = []
            # Not there any more: aborted, and the client has its last piece.
            if self._tasks.pop(index, None) is not None and choice.second is None:
                self._finish(index, finish)

    def _give(self, index: int, piece: Piece) -> None:
        if piece.finish is not None:
            self._choices[index].finish = piece.finish
            self._left -= 1
            if not self._left:
                self._done.set()
        self._sink(index, piece)


class Choice:
    """One choice as the watcher sees it. Owner: event loop."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._answer = watch.reading.answer()
        self.cut = False
        """Its budget is used up; its request is being ended."""
        self.over: Finish | None = None
        """The choice is complete: its request is being ended, and the client gets this finish."""
        self.finish: Finish | None = None
        """The finish that the client got."""
        self.reasoning = 0
        self.thought: list[int] = []
        """Output so far, as long as it may be cut."""
        self.second: Run | None = None
        """The run that continues after a cut."""

    @property
    def ends(self) -> bool:
        """Whether its request is to end."""
        return self.cut or self.over is not None

    def see(self, piece: Piece) -> Piece:
        """Account for one piece, on its way to the client: the same with its events, or with an end in error
        where they could not be read."""
        if self._answer.plain:  # most of what a model says after its reasoning takes no parsing
            return piece
        try:
            return self._parsed(piece)
        except Exception:  # a parser's fault: this runs in the engine's callback
            log.exception("an answer could not be read")
            self.over = _UNREADABLE
            finish = None if piece.finish is None else _UNREADABLE
            return Piece(piece.text, piece.tokens, piece.logprobs, finish, [])

    def _parsed(self, piece: Piece) -> Piece:
        answer, watch, finish = self._answer, self._watch, piece.finish
        began_inside = answer.thinking
        events = answer.feed(piece.text) if piece.text else []
        if finish is not None and failure(finish) is None:
            events += answer.finish()
        elif answer.done:
            self.over = _ENOUGH
        if began_inside and answer.thinking:
            self.reasoning += len(piece.tokens)
        if watch.budget is not None and not answer.settled:
            self.thought += piece.tokens
            self.cut = answer.thinking and self.reasoning >= watch.budget and finish is None
        return Piece(piece.text, piece.tokens, piece.logprobs, finish, events, answer.whole)
