"""Confirmed tokens on their way to the streams, in slices that the loop can bear."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from itertools import islice
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
"""Maximum number of tokens in a slice, except that a slice always has one row. Tokens that are searched for a
stop, or that are an event each, take 1 to 20 µs each, and a row may have those of many steps and of drafts.
A row whose tokens are fed together counts as one token (`Stream.cost`). One with log-probabilities that is
longer than a slice is divided: with 128 alternatives for each token, 32 rows took 50 to 60 ms."""

SLICES: Final = 2
"""Maximum number of slices that are delivered in one turn of the loop; fewer if fewer steps wait. While 1,024
clients of two replicas start, a turn takes 7 ms, and with one slice in each the p99 inter-token latency was
1.6 times as long, at the same throughput. With four it is 0.8 times as long, at 1% less
(`history/dp2-slices-simulated.json`)."""

ENDS: Final = 8
"""Maximum number of answers that a slice ends; the replicas of a loop divide it. At an end a handler returns
and a client sends its next request, which takes the loop ten times as long as an event. Without a limit, when
answers of 1,024 clients of two replicas ended together, a turn of the loop ended up to 128 of them in 20 ms
and started 16 requests. So 600 requests waited, while the devices ran 140 rows of 512. With the limit,
requests start as fast as answers end: throughput is 4% higher, and the median time to first token a third
(`history/dp2-ends-simulated.json`)."""

FEWEST_ENDS: Final = 4
"""Minimum of a replica's limit, however many replicas there are. Eight replicas on a CPU, with 200 clients
whose answers do not end together, made 590 requests/s with a limit of one, 801 with four and 859 with 32."""

STREAM_FAILED = Finish(
    FinishReason.ERROR, message="The text of this answer could not be made; the log says why."
)


_Line = OrderedDict[Request, "_Row"]
"""Rows in the order of delivery."""


class _Row:
    """A request with confirmed tokens that its stream has not received yet."""

    __slots__ = ("due", "finish", "last", "line", "logprobs", "request", "since")

    def __init__(self, request: Request, since: int) -> None:
        """`since`: the step of the first token that waits."""
        self.request = request
        self.since = since
        self.logprobs: list[RowLogprobs] = []
        """Log-probabilities of each token, if the request asked for them."""
        self.finish: Finish | None = None
        self.last: int | None = None
        """The token that caused the finish; -1 (not in the output): its logits were not finite."""
        self.line: _Line | None = None
        """Where the row waits; None: it is not due yet."""
        self.due = 0
        """The step at which it came there."""


class Backlog:
    """Results that were applied and not delivered yet, and the streams that wait for them.

    A request's tokens of all steps that wait are one event. So one step is one event while the loop keeps
    up, and a device that is faster than the loop costs it fewer events, not less throughput: an event takes
    the loop some 20 µs, each further token of it less than two. First tokens are delivered before all others,
    then the last ones of a few answers in each slice.

    A stream that raises (its detokenizer, its client's sink) ends alone, with `STREAM_FAILED`. Any other
    exception goes to the engine.

    Owner: event loop.
    """

    def __init__(self, recorder: Recorder, stopped: Callable[[Request, Finish], None]) -> None:
        """`stopped` is called for requests that end here: by a stop string, or with `STREAM_FAILED`."""
        self.ends = ENDS
        """Maximum number of answers that a slice ends."""
        self.interval = 1
        """Steps whose tokens are one event; a request's first and last go out at once."""
        self._recorder = recorder
        self._stopped = stopped
        self._streams: dict[Request, Stream] = {}
        self._rows: dict[Request, _Row] = {}
        """All rows that wait, by request."""
        self._held: deque[_Row] = deque()
        """Rows that were not due when they came, in order of arrival."""
        self._first = _Line()
        """Rows whose request has its first token to deliver. They are delivered before all others, so that
        the time to first token does not grow with the backlog."""
        self._last = _Line()
        """Rows whose request has ended. They are delivered after `_first`, at most `ends` in a slice. Their
        clients can then send the next request."""
        self._due = _Line()
        """All other rows that are due."""
        self._step = 1

    @property
    def waiting(self) -> int:
        """Steps since a row became due, the step of that included; 0: none is due."""
        return max(self._steps(line) for line in (self._first, self._last, self._due))

    @property
    def behind(self) -> int:
        """`waiting`, without rows that have ended: only rows that run grow with each step."""
        return max(self._steps(self._first), self._steps(self._due))

    def _steps(self, line: _Line) -> int:
        return self._step + 1 - next(iter(line.values())).due if line else 0

    @property
    def empty(self) -> bool:
        """Whether no row waits, due or not."""
        return not self._rows

    def open(self, request: Request, stream: Stream) -> None:
        """Deliver what comes for `request` to `stream`, up to its last piece."""
        self._streams[request] = stream

    def add(self, confirmed: Confirmed) -> None:
        """Add the results of one more applied step, or requests that ended without one."""
        # A step of prompts alone counts too: with --prefill-first many follow each other.
        self._step += bool(confirmed.requests or confirmed.prompt_tokens)
        rows = self._rows
        for request in confirmed.requests:
            if request not in rows:
                self._new(request)
        for at in sorted(confirmed.logprobs):
            rows[confirmed.requests[at]].logprobs.append(confirmed.logprobs[at])
        for at, finish in confirmed.ends.items():
            row = rows[confirmed.requests[at]]
            row.last = confirmed.tokens[at]
            self._ends(row, finish)
        for request in confirmed.finished:
            assert request.finish is not None
            row = rows.get(request) or self._new(request)
            self._ends(row, row.finish or request.finish)
        while self._held and self._held[0].since <= self._step + 1 - self.interval:
            self._not_held(self._held.popleft())

    def flush(self) -> None:
        """Make all rows that wait due: no step follows soon."""
        while self._held:
            self._not_held(self._held.popleft())

    def clear(self) -> None:
        """Forget what was not delivered; the streams stay."""
        self._rows.clear()
        self._held.clear()
        self._first.clear()
        self._last.clear()
        self._due.clear()

    def deliver_turn(self) -> None:
        """Deliver the slices of one turn of the loop."""
        for _ in range(min(self.waiting, SLICES)):
            self.deliver()

    def deliver(self) -> None:
        """Deliver the next slice."""
        rows = self._slice()
        if rows and self._deliver_part(rows[0]):
            return
        left, now = SLICE_TOKENS, self._recorder.now()
        gaps: Counter[float] = Counter()  # most rows of a slice have the same
        for number, row in enumerate(rows):
            stream = self._streams.get(row.request)
            if stream is not None:  # else it ended by a stop string after these tokens were on their way
                left -= stream.cost(len(row.request.output) - stream.count, row.logprobs)
                if left < 0 and number:
                    break
            assert row.line is not None
            del row.line[row.request], self._rows[row.request]
            if stream is not None:
                if stream.count and len(row.request.output) > stream.count:
                    gaps[now - stream.sent_at] += 1
                stream.sent_at = now
                self._deliver_row(row, stream)
        self._recorder.gaps(gaps)

    def _slice(self) -> list[_Row]:
        """The rows to be delivered next."""
        rows = [*islice(self._first.values(), SLICE), *islice(self._last.values(), self.ends)]
        return [*rows, *islice(self._due.values(), max(SLICE - len(rows), 0))][:SLICE]

    def _deliver_part(self, row: _Row) -> bool:
        """Deliver the first tokens of a row that has log-probabilities and exceeds a slice."""
        stream = self._streams.get(row.request)
        if stream is None or not row.logprobs:
            return False
        tokens, now = row.request.output[stream.count :], self._recorder.now()
        if len(tokens) < 2:
            return False
        most = max(len(tokens) * SLICE_TOKENS // stream.cost(len(tokens), row.logprobs), 1)
        if most >= len(tokens):
            return False
        if stream.count:
            self._recorder.gaps({now - stream.sent_at: 1})
        else:
            self._recorder.first_token(row.request)
        stream.sent_at = now
        fed, row.logprobs = row.logprobs[:most], row.logprobs[most:]
        if row.line is self._first:
            self._wait(row, self._due)
        found = self._call(row.request, stream.feed, tokens[:most], fed)
        if found is not None:
            self._stop(row.request, stream, found)
        return True

    def _new(self, request: Request) -> _Row:
        row = self._rows[request] = _Row(request, self._step)
        if self._is_first(request):
            self._wait(row, self._first)
        elif self.interval == 1:
            self._wait(row, self._due)
        else:
            self._held.append(row)
        return row

    def _not_held(self, row: _Row) -> None:
        if row.line is None:
            self._wait(row, self._due)

    def _ends(self, row: _Row, finish: Finish) -> None:
        row.finish = finish
        if row.line is not self._last:
            self._wait(row, self._last)

    def _wait(self, row: _Row, line: _Line) -> None:
        """Put the row at the end of a line, from another one if it is in one."""
        if row.line is not None:
            del row.line[row.request]
        row.line, row.due = line, self._step
        line[row.request] = row

    def _is_first(self, request: Request) -> bool:
        stream = self._streams.get(request)
        return stream is not None and stream.count == 0

    def end_all(self, finish: Finish) -> None:
        """Deliver what is known; then every stream gets its last piece."""
        self.flush()
        while self._first or self._last or self._due:
            self.deliver()
        for request in list(self._streams):
            request.finish = request.finish or finish  # no step will: timings and reports say how it ended
            self._end(request, finish)

    def _deliver_row(self, row: _Row, stream: Stream) -> None:
        request, logprobs = row.request, row.logprobs
        tokens = request.output[stream.count :]
        if stream.count == 0 and (tokens or row.last is not None):
            self._recorder.first_token(request)
        last = tokens.pop() if row.last is not None and row.last >= 0 else None
        if tokens:
            fed = logprobs[: len(tokens)] if logprobs else None
            found = self._call(request, stream.feed, tokens, fed)
            if found is not None:
                self._stop(request, stream, found)
                return
        if row.finish is not None:
            self._end(request, row.finish, last, logprobs[-1] if logprobs else None)

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
        """Return what `act` of the request's stream does; `STREAM_FAILED` if it raised: the others go on."""
        try:
            return act(*given)
        except Exception:
            log.exception("the stream of request %s failed", request.id)
            return STREAM_FAILED
