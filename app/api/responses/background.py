"""Background responses, and the clients that stream them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

import msgspec
from aiohttp import web

from app.api.responses.disk import Doc
from app.api.responses.events import ResponseEvents, error_event
from app.api.responses.store import Store
from app.api.responses.turn import Turn
from app.engine.failure import UNREADABLE, failure
from app.engine.job import Piece, Run
from app.http.access import Usage, begun, current_usage
from app.http.errors import fault
from app.http.sse import Dialect, EventStream
from app.http.tenant import permit
from core.errors import EngineFailed, LoomError, Overloaded, RequestError, Unavailable
from core.types import Finish, FinishReason

log = logging.getLogger(__name__)

MAX_LIVE = 1024
"""Background responses at once: each holds its own output, and a stream's events, in memory."""

MAX_UNSTORED = 256
"""Ended responses that are kept here because the store did not take their end."""

BURST = 256
"""Events in one write to a client that catches up."""

DIALECT = Dialect(error=error_event)


class Live:
    """One running response, and its events for the clients that stream it. Owner: event loop."""

    def __init__(self, turn: Turn, on_done: Callable[[Live], None]) -> None:
        self.turn = turn
        self.run: Run | None = None
        self.permit = permit()
        """Held to the end: the limits of its API key apply to it."""
        self.usage = current_usage() or Usage()
        """Held too: its request is reported when it has ended."""
        self.log: list[bytes] = []
        """Its events so far, one frame each; stays empty when it is not streamed."""
        self.followers: set[EventStream] = set()
        self.done = asyncio.Event()
        self.error: LoomError | None = None
        """The error that it failed with."""
        self.stored = False
        """Whether the store has the response, as it was when it began."""
        self._early: list[Piece] = []
        """Pieces that came before the run was known."""
        self._events: ResponseEvents | None = None
        self._on_done = on_done

    @property
    def doc(self) -> Doc:
        """The response as it is now."""
        assert self._events is not None
        return self._events.doc

    def begin(self, run: Run) -> None:
        """Called when the response's job runs."""
        self.run = run
        self._events = ResponseEvents(self.turn, run)
        self._log(self._events.begin())
        for piece in self._early:
            self.take(0, piece)

    def take(self, index: int, piece: Piece) -> None:
        """The engine's sink."""
        events = self._events
        if events is None:
            self._early.append(piece)
        elif not self.done.is_set():
            try:
                self._log(events.take(piece))
                if piece.finish is not None:
                    self.error = failure(piece.finish)
                    error = self.error
                    self._end(events.end(piece.finish) if error is None else events.fail(fault(error)))
            except Exception:  # a parser's fault: this runs in the engine's callback, others' rows are next
                log.exception("an answer could not be read")
                self.error = EngineFailed(UNREADABLE)
                self._end(events.fail(fault(self.error)))
                assert self.run is not None
                asyncio.get_running_loop().call_soon(self.run.abort)
            for stream in self.followers:
                stream.wake()

    def give_up(self) -> None:
        """End with an error: the engine has stopped and sends no last piece."""
        if self._events is not None:
            self.take(
                0, Piece("", [], None, Finish(FinishReason.ABORT, message="The server is shutting down."))
            )

    def _end(self, last: list[bytes]) -> None:
        self._log(last)
        self.done.set()
        self._on_done(self)

    def _log(self, frames: list[bytes]) -> None:
        if self.turn.streamed:
            self.log += frames

    async def follow(self, request: web.Request, start: int) -> web.StreamResponse:
        """Answer with its events from number `start` on, until its end."""
        async with EventStream(request, dialect=DIALECT) as stream:
            self.followers.add(stream)
            try:
                at = start
                while True:
                    while at < len(self.log) and not stream.congested:
                        burst = self.log[at : at + BURST]
                        stream.write(b"".join(burst))
                        at += len(burst)
                    if at < len(self.log):
                        await stream.drained()
                    elif self.done.is_set():
                        break
                    else:
                        await stream.wait()
            finally:
                self.followers.discard(stream)
        return stream.response


class Responses:
    """Stored responses, and the running ones in the background. Owner: event loop."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._live: dict[str, Live] = {}
        self._unstored: dict[str, Live] = {}
        """Ended responses, the oldest first. In the store they are in progress for ever."""

    async def start(self, turn: Turn) -> Live:
        """Run a turn in the background. Raises what the engine refuses it with, and `Unavailable`
        and `DiskFull` when it cannot be stored, and so could not be fetched."""
        if not turn.kept:
            raise RequestError("This server keeps no responses, so none can run in the background.", "store")
        if len(self._live) >= MAX_LIVE:
            raise Overloaded("Too many responses are made in the background.")
        live = Live(turn, self._finished)
        run = await turn.engine.start(turn.job, live.take)
        begun(run)
        live.permit.hold()
        live.usage.hold()
        self._live[turn.id] = live
        live.begin(run)
        stored = False
        try:
            stored = live.done.is_set() or await self.store.require(turn.record(live.doc))
            live.stored = stored
        finally:
            if not stored:  # or the client has gone before it knew the response's id
                run.abort()
        if not stored:
            raise Unavailable("The response cannot be stored.")
        return live

    def _finished(self, live: Live) -> None:
        """Whoever asks from now on asks the store, which does things in order."""
        del self._live[live.turn.id]
        assert live.run is not None
        live.permit.use(output=live.run.output_tokens)
        live.permit.release()
        live.usage.add(live.run)
        live.usage.end()
        ended = self.store.put(live.turn.record(live.doc, b"".join(live.log)))
        ended.add_done_callback(partial(self._settle, live))

    def _settle(self, live: Live, ended: asyncio.Future[bool]) -> None:
        """Keep a response whose end was not stored: whoever asks for it would wait for ever."""
        if live.stored and (ended.cancelled() or ended.exception() is not None or not ended.result()):
            self._unstored[live.turn.id] = live
            if len(self._unstored) > MAX_UNSTORED:
                del self._unstored[next(iter(self._unstored))]

    def live(self, owner: str, id: str) -> Live | None:
        """A response that is being made, or whose end could not be stored."""
        live = self._live.get(id) or self._unstored.get(id)
        return live if live is not None and live.turn.owner == owner else None

    async def cancel(self, owner: str, id: str) -> Doc:
        """End a response that is being made; one that is done stays as it is. Raises `RequestError`."""
        live = self.live(owner, id)
        if live is not None:
            assert live.run is not None
            live.run.abort()
            await live.done.wait()
            return live.doc
        record = await self.store.get(owner, id)
        doc: Doc = msgspec.json.decode(record.doc)
        if not doc.get("background"):
            raise RequestError("Only a response made in the background can be cancelled.", "response_id")
        return doc

    async def delete(self, owner: str, id: str) -> None:
        """Forget a response; one that is being made is ended first. Raises `NotFound`."""
        if self.live(owner, id) is not None:
            await self.cancel(owner, id)
        await self.store.delete(owner, id)
        self._unstored.pop(id, None)

    async def close(self) -> None:
        """End running responses and close the store."""
        for live in list(self._live.values()):
            live.give_up()
            if live.run is not None:
                live.run.abort()
        await self.store.close()


RESPONSES = web.AppKey("responses", Responses)
