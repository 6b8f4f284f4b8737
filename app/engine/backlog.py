"""Confirmed tokens on their way to the streams, in slices that the loop can bear."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from app.engine.metrics import Recorder
from app.engine.output import Stream
from core.request import Request
from core.schedule.scheduler import Confirmed
from core.types import Finish, FinishReason

log = logging.getLogger(__name__)

SLICE = 32
"""Tokens delivered in one callback: 32 of at most 10 µs stay under the loop's 0.3 ms."""

STREAM_FAILED = Finish(
    FinishReason.ERROR, message="The text of this answer could not be made; the log says why."
)


class Backlog:
    """Results that were applied and not delivered yet, and the streams that wait for them.

    A stream that raises (its detokenizer, its client's sink) ends alone, with `STREAM_FAILED`. Any other
    exception goes to the engine.

    Owner: event loop.
    """

    def __init__(self, recorder: Recorder, stopped: Callable[[Request, Finish], None]) -> None:
        """`stopped` is called for requests that end here: by a stop string, or with `STREAM_FAILED`."""
        self._recorder = recorder
        self._stopped = stopped
        self._streams: dict[Request, Stream] = {}
        self._entries: deque[tuple[Confirmed, int]] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def open(self, request: Request, stream: Stream) -> None:
        """Deliver what comes for `request` to `stream`, up to its last piece."""
        self._streams[request] = stream

    def add(self, confirmed: Confirmed) -> None:
        """One more applied step."""
        self._entries.append((confirmed, 0))

    def clear(self) -> None:
        """Forget what was not delivered; the streams stay."""
        self._entries.clear()

    def deliver(self) -> None:
        """The next slice."""
        confirmed, start = self._entries.popleft()
        requests, stop = confirmed.requests, min(start + SLICE, len(confirmed.tokens))
        while stop < len(requests) and requests[stop] is requests[stop - 1]:
            stop += 1  # tokens of one request are delivered together
        self._deliver_tokens(confirmed, start, stop)
        if stop < len(confirmed.tokens):
            self._entries.appendleft((confirmed, stop))
            return
        for request in confirmed.finished:
            if request in self._streams:
                assert request.finish is not None
                self._end(request, request.finish)

    def end_all(self, finish: Finish) -> None:
        """Deliver what is known; then every stream gets its last piece."""
        while self._entries:
            self.deliver()
        for request in list(self._streams):
            request.finish = request.finish or finish  # no step will: timings and reports say how it ended
            self._end(request, finish)

    def _deliver_tokens(self, confirmed: Confirmed, start: int, stop: int) -> None:
        requests, at = confirmed.requests, start
        while at < stop:
            request, first = requests[at], at
            while at < stop and requests[at] is request:
                at += 1
            stream = self._streams.get(request)
            if stream is None:
                continue  # ended by a stop string after these tokens were already on their way
            if stream.count == 0:
                self._recorder.first_token(request)
            self._deliver_row(request, stream, confirmed, range(first, at))

    def _deliver_row(self, request: Request, stream: Stream, confirmed: Confirmed, row: range) -> None:
        """Deliver the tokens of one request, at the indices `row`. The last one may end it."""
        tokens, logprobs, finish = confirmed.tokens, confirmed.logprobs, confirmed.ends.get(row[-1])
        if fed := row if finish is None else row[:-1]:
            rows = [logprobs[at] for at in fed] if row[0] in logprobs else None
            found = self._call(request, stream.feed, tokens[fed.start : fed.stop], rows)
            if found is not None:
                self._stop(request, stream, found)
                return
        if finish is not None:
            token = tokens[row[-1]] if tokens[row[-1]] >= 0 else None  # -1: its logits were not finite
            self._end(request, finish, token, logprobs.get(row[-1]))

    def _end(self, request: Request, finish: Finish, *last: object) -> None:
        stream = self._streams[request]
        if self._call(request, stream.end, finish, *last) is STREAM_FAILED:
            self._stop(request, stream, STREAM_FAILED)
        else:
            self._close(request, stream)

    def _stop(self, request: Request, stream: Stream, finish: Finish) -> None:
        if finish is STREAM_FAILED:
            self._call(request, stream.fail, STREAM_FAILED)
        self._stopped(request, finish)
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
