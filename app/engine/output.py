"""Tokens of one request become pieces of text, up to its stop."""

from __future__ import annotations

from collections.abc import Sequence

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
    """One choice on its way to the client. Each delivery becomes one piece, with the tokens of one or more
    steps. A piece costs the event loop some 20 µs, most of them for making and sending its event.

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
        single_tokens: bool = False,
    ) -> None:
        """The piece with the finish goes to `last`, all before it to `sink`. `single_tokens`: see `Job`."""
        self._index = index
        self._sink = sink
        self._last = last
        self._detokenizer = detokenizer
        self._stops = stops
        self._repetition = repetition
        self._searched = stops is not None or repetition is not None
        self._single = single_tokens
        self._tokens: list[int] | None = None
        """Tokens without text yet."""
        self._logprobs: list[RowLogprobs] | None = None
        self.count = 0
        """Tokens that reached the client's answer."""
        self.sent_at = 0.0
        """The time of the latest delivery; 0 before the first."""
        self.done = False

    def cost(self, tokens: int, logprobs: Sequence[RowLogprobs] | None = None) -> int:
        """Return the cost of `feed` with so many tokens, in tokens that are fed one by one. Tokens that are
        fed together cost as much as one: `feed` of 32 rows took 26 µs with 4 tokens a row, 49 µs with 32."""
        if logprobs:  # an alternative takes 10 to 15 µs, most of them for its part of the event
            return tokens * (1 + len(logprobs[0].top_ids))
        return tokens if self._searched or self._single else 1

    def feed(self, tokens: list[int], logprobs: Sequence[RowLogprobs] | None = None) -> Finish | None:
        """Send the tokens of one or more steps, with the log-probabilities of each. Return the finish where
        they complete a stop string or a repetition; the last piece has been sent then, and the tokens behind
        the stop are dropped."""
        if self._searched or logprobs is not None or (self._single and len(tokens) > 1):
            return self._feed_each(tokens, logprobs)
        text = self._detokenizer.feed(tokens)
        if text and self._tokens is None:
            # Nearly every step: nothing waits, nothing is searched for.
            self.count += len(tokens)
            self._sink(self._index, Piece(text, tokens))
            return None
        self._count(tokens, None)
        if text:
            self._send(text, None)
        return None

    def _feed_each(self, tokens: list[int], logprobs: Sequence[RowLogprobs] | None) -> Finish | None:
        text, finish = "", None
        for at, token in enumerate(tokens):
            if text and self._single:
                self._send(text, None)
                text = ""
            self._count([token], logprobs and logprobs[at : at + 1])
            certain, finish = self._search(token)
            text += certain
            if finish is not None:
                break
        if finish is not None and finish is not REPEATED:
            self._send(text, finish)
        elif text:
            self._send(text, None)
        if finish is REPEATED:
            self.end(REPEATED)
        return finish

    def _search(self, token: int) -> tuple[str, Finish | None]:
        """The text that became certain with one more token, and the finish where it ends the answer."""
        text = self._detokenizer.feed([token])
        if text:
            text, matched = self._scan(text)
            if matched is not None:
                return text, Finish(FinishReason.STOP, matched)
        if self._repetition is not None and self._repetition.feed(token):
            return text, REPEATED
        return text, None

    def end(
        self, finish: Finish, last: int | None = None, logprobs: RowLogprobs | None = None
    ) -> Finish | None:
        """The request ended. `last` is the token that ended it: a stop id is counted but has no
        text, any other is fed first. Returns the finish that was sent: that of a stop string where the last
        text completes one. None if one was sent before."""
        if self.done:
            return None
        if last is not None:
            rows = None if logprobs is None else [logprobs]
            if finish.reason is FinishReason.STOP:
                self._count([last], rows)
            elif (found := self.feed([last], rows)) is not None:
                return found
        text, matched = self._scan(self._detokenizer.finish())
        if matched is None:
            text += "" if self._stops is None else self._stops.flush()
        elif finish.reason in (FinishReason.STOP, FinishReason.LENGTH):  # an error stays one
            finish = Finish(FinishReason.STOP, matched)
        self._send(text, finish)
        return finish

    def _scan(self, text: str) -> tuple[str, str | None]:
        """Search more text for stops. Returns the text that may be sent, and the stop that it completes."""
        if self._stops is None or self.count <= self._stops.min_tokens:
            return text, None
        return self._stops.feed(text)

    def fail(self, finish: Finish) -> None:
        """Send an error as the last piece, also where sending the last piece raised."""
        sink = self._sink if self.done else self._last
        self.done = True
        sink(self._index, Piece("", [], None, finish))

    def _count(self, tokens: Sequence[int], logprobs: Sequence[RowLogprobs] | None) -> None:
        self.count += len(tokens)
        self._tokens = [*(self._tokens or ()), *tokens]
        if logprobs is not None:
            self._logprobs = [*(self._logprobs or ()), *logprobs]

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
