"""Confirmed tokens on their way to the streams, in slices that the loop can bear."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from app.engine.metrics import Recorder
from app.engine.output import Stream
from core.plan import RowLogprobs
from core.request import Request
from core.schedule.scheduler import Confirmed
from core.types import Finish, FinishReason

log = logging.getLogger(__name__)

SLICE: Final = 32
"""Requests whose tokens are delivered in one callback: 32 of at most 10 µs stay under the loop's 0.3 ms."""

SLICE_TOKENS: Final = 4 * SLICE
"""After these a slice ends as well: where they are searched for a stop, or each is an event, they take 1 to
20 µs each, and a row may have those of several steps and of drafts."""

STREAM_FAILED = Finish(
    FinishReason.ERROR, message="The text of this answer could not be made; the log says why."
)


class _Row:
    """The tokens of one request that are delivered together."""

    __slots__ = ("finish", "logprobs", "request", "tokens", "with_token")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.logprobs: list[RowLogprobs] = []
        """Of each token, where the request asked for them."""
        self.finish: Finish | None = None
        self.with_token = False
        """The last token caused the finish."""


class Backlog:
    """Results that were applied and not delivered yet, and the streams that wait for them.

    A delivery takes all steps that wait, and a request's tokens of all of them are one event. So one step is
    one event while the loop keeps up, and a device that is faster than the loop costs it fewer events, not
    less throughput: an event takes the loop some 20 µs, each further token of it less than two.

    A stream that raises (its detokenizer, its client's sink) ends alone, with `STREAM_FAILED`. Any other
    exception goes to the engine.

    Owner: event loop.
    """

    def __init__(self, recorder: Recorder, stopped: Callable[[Request, Finish], None]) -> None:
        """`stopped` is called for requests that end here: by a stop string, or with `STREAM_FAILED`."""
        self._recorder = recorder
        self._stopped = stopped
        self._streams: dict[Request, Stream] = {}
        self._steps: list[Confirmed] = []
        """Those that wait."""
        self._rows: deque[_Row] = deque()
        """What is left of the delivery under way."""

    def __len__(self) -> int:
        """Steps that wait; the delivery under way counts as one."""
        return len(self._steps) + bool(self._rows)

    def open(self, request: Request, stream: Stream) -> None:
        """Deliver what comes for `request` to `stream`, up to its last piece."""
        self._streams[request] = stream

    def add(self, confirmed: Confirmed) -> None:
        """One more applied step."""
        self._steps.append(confirmed)

    def clear(self) -> None:
        """Forget what was not delivered; the streams stay."""
        self._steps.clear()
        self._rows.clear()

    def deliver(self) -> None:
        """The next slice."""
        if not self._rows:
            self._rows.extend(_by_request(self._steps))
            self._steps.clear()
        tokens = 0
        for _ in range(min(SLICE, len(self._rows))):
            row = self._rows.popleft()
            tokens += len(row.tokens)
            stream = self._streams.get(row.request)
            if stream is not None:  # else it ended by a stop string after these tokens were on their way
                self._deliver_row(row, stream)
            if tokens >= SLICE_TOKENS:
                break

    def end_all(self, finish: Finish) -> None:
        """Deliver what is known; then every stream gets its last piece."""
        while self:
            self.deliver()
        for request in list(self._streams):
            request.finish = request.finish or finish  # no step will: timings and reports say how it ended
            self._end(request, finish)

    def _deliver_row(self, row: _Row, stream: Stream) -> None:
        request, tokens, logprobs, last = row.request, row.tokens, row.logprobs, None
        if stream.count == 0 and tokens:
            self._recorder.first_token(request)
        if row.with_token:
            last = tokens.pop()
        if tokens:
            fed = logprobs[: len(tokens)] if logprobs else None
            found = self._call(request, stream.feed, tokens, fed)
            if found is not None:
                self._stop(request, stream, found)
                return
        if row.finish is not None:
            if last is None:
                self._end(request, row.finish)
            else:
                token = last if last >= 0 else None  # -1: its logits were not finite
                self._end(request, row.finish, token, logprobs[-1] if logprobs else None)

    def _end(self, request: Request, finish: Finish, *last: object) -> None:
        stream = self._streams[request]
        sent = self._call(request, stream.end, finish, *last)
        if sent is STREAM_FAILED:
            self._stop(request, stream, STREAM_FAILED)
        else:
            request.finish = sent or finish
            self._close(request, stream)

    def _stop(self, request: Request, stream: Stream, finish: Finish) -> None:
        if finish is STREAM_FAILED:
            self._call(request, stream.fail, STREAM_FAILED)
        self._stopped(request, finish)
        request.finish = finish  # a token behind the stop may have ended it already
        self._close(request, stream)

    def _close(self, request: Request, stream: Stream) -> None:
        del self._streams[request]
        # Tokens past a stop string were computed but are not part of the answer.
        del request.output[stream.count :]
        self._recorder.ended(request)

    def _call(self, request: Request, act: Callable[..., Finish | None], *given: object) -> Finish | None:
        """What `act` of the request's stream returns; `STREAM_FAILED` where it raised: the others go on."""
        try:
            return act(*given)
        except Exception:
            log.exception("the stream of request %s failed", request.id)
            return STREAM_FAILED


def _by_request(steps: Sequence[Confirmed]) -> Iterator[_Row]:
    """The tokens of these steps, those of a request together, and requests that ended without one."""
    rows: dict[Request, _Row] = {}
    for step in steps:
        for at, request in enumerate(step.requests):
            if (row := rows.get(request)) is None:
                row = rows[request] = _Row(request)
            row.tokens.append(step.tokens[at])
        for at in sorted(step.logprobs):
            rows[step.requests[at]].logprobs.append(step.logprobs[at])
        for at, finish in step.ends.items():
            row = rows[step.requests[at]]
            row.finish, row.with_token = finish, True
        for request in step.finished:
            assert request.finish is not None
            if (row := rows.get(request)) is None:
                row = rows[request] = _Row(request)
            row.finish = row.finish or request.finish
    yield from rows.values()
