"""From pieces to responses: the sinks that the engine calls."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from app.engine.failure import UNREADABLE, failure
from app.engine.job import Generator, Job, Piece, Run, Sink
from app.http.access import begun, used
from app.http.aside import MANY, aside
from app.http.burst import Write
from app.http.sse import EventStream
from app.parsers.base import Content, Event, merged
from core.errors import Aborted, EngineFailed, LoomError
from core.plan import RowLogprobs
from core.types import FinishReason

log = logging.getLogger(__name__)
T = TypeVar("T")


class Buffer:
    """Pieces of one choice, put together. Owner: event loop."""

    __slots__ = ("events", "last", "logprobs", "texts", "tokens")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[RowLogprobs] | None = None
        self.events: list[Event] | None = None
        self.last: Piece | None = None

    def add(self, piece: Piece) -> None:
        """Append one piece."""
        if piece.events is not None and self.events is None:
            self.events = [Content("".join(self.texts))] if self.texts else []
        if self.events is not None:
            self.events += piece.parsed()
        if piece.text:
            self.texts.append(piece.text)
        self.tokens += piece.tokens
        if piece.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs += piece.logprobs
        self.last = piece

    @property
    def ended(self) -> bool:
        """Whether the choice's last piece is here."""
        return self.last is not None and self.last.finish is not None

    def piece(self) -> Piece:
        """All pieces so far as one."""
        assert self.last is not None
        text, finish, calls = "".join(self.texts), self.last.finish, self.last.calls
        events = None if self.events is None else merged(self.events)
        return Piece(text, self.tokens, self.logprobs, finish, events, calls)


class Collector:
    """A sink that keeps everything, for answers sent at once. Owner: event loop."""

    __slots__ = ("_buffers", "_done", "_left")

    def __init__(self, choices: int) -> None:
        self._buffers = [Buffer() for _ in range(choices)]
        self._left = choices
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take(self, index: int, piece: Piece) -> None:
        """The engine's sink."""
        self._buffers[index].add(piece)
        if piece.finish is None or self._done.done():
            return
        self._left -= 1
        if (error := failure(piece.finish)) is not None:
            self._done.set_exception(error)
        elif not self._left:
            self._done.set_result(None)

    async def collect(self) -> list[Piece]:
        """Every choice complete, in order. Raises what went wrong with the first that failed, and
        does not wait for the others then."""
        await self._done
        return [buffer.piece() for buffer in self._buffers]

    async def finished(self) -> None:
        """Wait for choices that make no text. Raises what `collect` does, and `Aborted` where one was
        ended by its id."""
        for piece in await self.collect():
            if piece.finish is not None and piece.finish.reason is FinishReason.ABORT:
                raise Aborted


class IntervalSink:
    """A sink in front of another: after a choice's first piece, it passes on at least `every` tokens at a
    time. Owner: event loop."""

    __slots__ = ("_begun", "_every", "_held", "_sink")

    def __init__(self, sink: Sink, every: int) -> None:
        self._sink = sink
        self._every = every
        self._begun: set[int] = set()
        self._held: dict[int, Buffer] = {}

    def take(self, index: int, piece: Piece) -> None:
        """The engine's sink."""
        if index in self._begun:
            held = self._held.setdefault(index, Buffer())
            held.add(piece)
            if piece.finish is None and len(held.tokens) < self._every:
                return
            piece = self._held.pop(index).piece()
        self._begun.add(index)
        self._sink(index, piece)


class Frames(ABC, Generic[T]):
    """Turns pieces into the answer of one route: into events as they come, or into one object. Owner: event
    loop."""

    __slots__ = ()

    def head(self) -> bytes | None:
        """The bytes to send before the first token, if any."""
        return None

    @abstractmethod
    def delta(self, index: int, piece: Piece) -> bytes | None:
        """The event of new text and tokens; None when there is nothing to send yet."""

    @abstractmethod
    def finish(self, index: int, piece: Piece) -> bytes:
        """The event that ends one choice, after that of its last piece's text."""

    def rest(self) -> Iterable[bytes]:
        """The parts that follow the last choice's end, each made when the reader has the one before."""
        return ()

    def failed(self, error: LoomError) -> bytes | None:
        """The event of a failure; None: the dialect's own."""
        return None

    def whole(self, pieces: Sequence[Piece]) -> T:
        """The answer as one JSON object, from the whole piece of each choice. Called in a thread if that is
        long. Routes that only stream have none."""
        raise TypeError(f"{type(self).__name__} makes events only")


class Delivery:
    """A sink that writes each piece to the client as it comes, inside the engine's own callback.

    While the reader is slow (or the stream not open yet, or `patient`) pieces of a choice are put
    together instead and become one event later: nothing is lost, and what is held is bounded by
    the output itself. Owner: event loop.
    """

    __slots__ = ("_closed", "_error", "_frames", "_held", "_holding", "_left", "_stream", "_weight")

    def __init__(self, choices: int) -> None:
        self._held: dict[int, Buffer] = {}
        self._holding = True
        self._closed = False
        self._left = choices
        self._error: LoomError | None = None
        self._weight = 0
        self._frames: Frames[Any] | None = None
        self._stream: EventStream | None = None

    def take(self, index: int, piece: Piece) -> None:
        """The engine's sink, on the way of every token."""
        stream = self._stream
        if self._holding or stream is None or stream.congested:
            self._hold(index, piece)
        else:
            assert self._frames is not None
            self._write(_events(self._frames, index, piece), stream.post)

    async def run(
        self, stream: EventStream, frames: Frames[Any], patient: bool = False, weight: int = 0
    ) -> None:
        """Write from the head until every choice has ended, then the rest. Raises what made one fail, unless
        the frames report it themselves.

        `patient` waits for the end of all choices before the first event. `weight` is that of the prompts'
        log-probabilities, which some events carry: where they are many, no event is made in the engine's
        callback, but here and in a thread.
        """
        self._stream, self._frames, self._weight = stream, frames, weight
        if (head := frames.head()) is not None:
            stream.write(head)
        try:
            while patient and self._left > len(self._ended()):
                await stream.wait()
            await self._release()
            while self._left and self._error is None:
                if self._held:
                    await stream.drained()
                    await self._release()
                else:
                    await stream.wait()
            if self._error is not None:
                if (event := frames.failed(self._error)) is None:
                    raise self._error
                stream.write(event)
                return
            for part in frames.rest():
                if stream.keep(part):
                    await asyncio.sleep(0)  # sends them; `drained` does not wait for a reader that keeps up
                    await stream.drained()
        finally:
            self._closed = self._holding = True
            self._held.clear()
            # The frames know their runs, whose sink this is. Without that cycle all of it is freed now: with
            # it a request left 56 objects to the collector, which took 1 s of 10 with 940 short requests/s.
            self._stream = self._frames = None

    def _ended(self) -> list[int]:
        return [index for index, buffer in self._held.items() if buffer.ended]

    def _hold(self, index: int, piece: Piece) -> None:
        if self._closed:
            return  # the answer has ended; an aborted choice still gets its last piece
        self._holding = True
        if index not in self._held:
            self._held[index] = Buffer()
        self._held[index].add(piece)
        if self._stream is not None:
            self._stream.wake()

    async def _release(self) -> None:
        stream, frames = self._stream, self._frames
        assert stream is not None and frames is not None
        while self._held and not stream.congested and self._error is None:
            index = next(iter(self._held))
            piece = self._held.pop(index).piece()
            # Pieces that come while a thread makes this event are held: the frames are its own so long.
            count = self._weight + logprob_weight(piece)
            self._write(await aside(count, partial(_events, frames, index, piece)), stream.write)
        self._holding = bool(self._held) or self._weight > MANY

    def _write(self, events: Events, write: Write) -> None:
        event, end, error = events
        stream = self._stream
        assert stream is not None
        if end is not None:
            self._left -= 1
            event = end if event is None else event + end
        if event is not None and (self._left or error is not None):
            write(event)
        elif event is not None:
            stream.keep(event)
        if error is not None or not self._left:
            self._error = error
            self._holding = True
            stream.wake()


class Events(NamedTuple):
    """The events of one piece: for its text and for its choice's end, and the error if the stream fails."""

    delta: bytes | None
    end: bytes | None = None
    error: LoomError | None = None


def _events(frames: Frames[Any], index: int, piece: Piece) -> Events:
    """Make the events of a piece. A choice that failed sends what was produced before."""
    try:
        if piece.finish is None:
            return Events(frames.delta(index, piece))
        if (error := failure(piece.finish)) is not None:
            return Events(frames.delta(index, msgspec.structs.replace(piece, finish=None)), error=error)
        return Events(frames.delta(index, piece), frames.finish(index, piece))
    except Exception:  # a parser's fault: this runs in the engine's callback, others' rows are next
        log.exception("an answer could not be read")
        return Events(None, error=EngineFailed(UNREADABLE))


def logprob_weight(piece: Piece) -> int:
    """Weight of a piece's log-probabilities, in items of `aside`."""
    rows = piece.logprobs
    return _items(len(rows), len(rows[0].top_ids)) if rows else 0


def prompt_weight(runs: Sequence[Run]) -> int:
    """Weight of the log-probabilities of the prompts of all `runs`, in items of `aside`."""
    asked = ((len(run.prompt), run.params) for run in runs if run.params.prompt_logprobs >= 0)
    return sum(_items(n, params.prompt_logprobs + len(params.prompt_logprob_ids)) for n, params in asked)


def _items(tokens: int, alternatives: int) -> int:
    """Items for `aside`. Four alternatives take as long as a token, 6 us: 249 tokens with 128 held the loop
    for 65 ms."""
    return tokens * (1 + alternatives // 4)


class running:
    """Start every job; whatever happens inside, none is left running after.

    Choices are numbered through: job 0's first. A cancelled handler (the client has gone) leaves
    through here too, also while a later job is still starting.
    """

    __slots__ = ("_engine", "_jobs", "_runs", "_sink")

    def __init__(self, engine: Generator, jobs: Sequence[Job], sink: Sink) -> None:
        self._engine = engine
        self._jobs = jobs
        self._sink = sink
        self._runs: list[Run] = []

    async def __aenter__(self) -> list[Run]:
        sink, base, total = self._sink, 0, sum(job.n for job in self._jobs)
        started = False
        try:
            for job in self._jobs:
                self._runs.append(await self._engine.start(job, _shifted(sink, base) if base else sink))
                begun(self._runs[-1])
                base += job.n
                if base < total:
                    await asyncio.sleep(0)  # encoding thousands of short prompts in one go is a long slice
            started = True
        finally:
            if not started:
                self._end()
        return self._runs

    async def __aexit__(self, *error: object) -> None:
        self._end()

    def _end(self) -> None:
        for run in self._runs:
            run.abort()
            used(run)


def _shifted(sink: Sink, base: int) -> Sink:
    def shifted(index: int, piece: Piece) -> None:
        sink(base + index, piece)

    return shifted
