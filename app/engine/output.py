"""Tokens of one request become pieces of text, up to its stop."""

from __future__ import annotations

from app.engine.job import Piece, Sink
from app.text.detokenizer import Detokenizer
from app.text.repetition import RepetitionScanner
from app.text.stops import StopScanner
from core.plan import RowLogprobs
from core.types import Finish, FinishReason

REPEATED = Finish(FinishReason.STOP, "repetition_detected")
"""vLLM's word, under a reason that every client knows."""


def _discard(index: int, piece: Piece) -> None:
    """The sink of a stream that has ended."""


class Stream:
    """One choice on its way to the client.

    Tokens whose text is not certain yet (half a character, the start of a stop string) are sent
    with the piece that completes it. Owner: event loop.
    """

    def __init__(
        self,
        index: int,
        sink: Sink,
        last: Sink,
        detokenizer: Detokenizer,
        stops: StopScanner | None = None,
        repetition: RepetitionScanner | None = None,
    ) -> None:
        """The piece with the finish goes to `last`, all before it to `sink`."""
        self._index = index
        self._sink = sink
        self._last = last
        self._detokenizer = detokenizer
        self._stops = stops
        self._repetition = repetition
        self._searched = stops is not None or repetition is not None
        self._tokens: list[int] | None = None
        """Those without text yet."""
        self._logprobs: list[RowLogprobs] | None = None
        self.count = 0
        """Tokens that reached the client's answer."""
        self.done = False

    def feed(self, token: int, logprobs: RowLogprobs | None) -> Finish | None:
        """One more token. Returns the finish when its text completes a stop string, or it a repetition; that
        piece has been sent then."""
        ids = [token]
        text = self._detokenizer.feed(ids)
        if text and logprobs is None and self._tokens is None and not self._searched:
            # Nearly every token: nothing waits, nothing is searched for.
            self.count += 1
            self._sink(self._index, Piece(text, ids))
            return None
        self._count(token, logprobs)
        if self._stops is not None and text:
            text, matched = self._stops.feed(text)
            if matched is not None:
                finish = Finish(FinishReason.STOP, matched)
                self._send(text, finish)
                return finish
        if text:
            self._send(text, None)
        if self._repetition is not None and self._repetition.feed(token):
            self.end(REPEATED)
            return REPEATED
        return None

    def end(self, finish: Finish, last: int | None = None, logprobs: RowLogprobs | None = None) -> None:
        """The request ended. `last` is the token that ended it: a stop id is counted but has no
        text, any other is fed first."""
        if self.done:
            return
        if last is not None:
            if finish.reason is FinishReason.STOP:
                self._count(last, logprobs)
            elif self.feed(last, logprobs) is not None:
                return
        text = self._detokenizer.finish()
        if self._stops is not None:
            text, matched = self._stops.feed(text)
            if matched is not None:
                finish = Finish(FinishReason.STOP, matched)
            else:
                text += self._stops.flush()
        self._send(text, finish)

    def fail(self, finish: Finish) -> None:
        """Send an error as the last piece, also where sending the last piece raised."""
        sink = self._sink if self.done else self._last
        self.done = True
        sink(self._index, Piece("", [], None, finish))

    def _count(self, token: int, logprobs: RowLogprobs | None) -> None:
        self.count += 1
        if self._tokens is None:
            self._tokens = [token]
        else:
            self._tokens.append(token)
        if logprobs is not None:
            if self._logprobs is None:
                self._logprobs = []
            self._logprobs.append(logprobs)

    def _send(self, text: str, finish: Finish | None) -> None:
        piece = Piece(text, self._tokens or [], self._logprobs, finish)
        self._tokens = self._logprobs = None
        self.done = finish is not None
        if finish is None:
            self._sink(self._index, piece)
        else:
            self._last(self._index, piece)
            # Without the cycle of run and stream both are freed at once, not by a garbage collection.
            self._sink = self._last = _discard
