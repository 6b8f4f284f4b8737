"""One report per request that runs the model, for traces and dumps: the request, its outcome and its timings.
Nothing is collected unless a reporter is configured."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Protocol

import msgspec
from aiohttp import web

from app.engine.job import Run
from app.http.access import CLIENT_GONE, Usage
from app.http.errors import Fault
from core.clock import monotonic
from core.request import SamplingParams
from core.types import FinishReason

MAX_LISTED = 128
"""Finish reasons and events in a report: a request may have thousands of prompts, each of them chunks."""


class Reporter(Protocol):
    """Takes reports. Its calls are made on the event loop: they neither block nor raise."""

    keeps_bodies: bool
    """Whether it needs the body in `accepted`."""

    def accepted(self, report: Report) -> None:
        """The request's first job was queued; no step with it has run."""
        ...

    def ended(self, report: Report) -> None:
        """The request is over: answered, refused, or its client disconnected."""
        ...

    async def close(self) -> None:
        """Flush what is queued, within a few seconds."""
        ...


class Report(Usage, kw_only=True):
    """A request that runs the model. Times are seconds of the engine's clock; 0: it did not get there.
    Owner: event loop."""

    request: web.Request
    operation: str
    """`chat`, `text_completion`, `embeddings`, …: the GenAI conventions' word for its route."""
    reporters: Iterable[Reporter]
    arrived: float
    created: float
    """`arrived` as seconds since 1970."""
    body: bytes = b""
    """The body as received, until `accepted`; empty where no reporter needs it."""
    model: str = ""
    """The model's name as the client sent it."""
    stream: bool | None = None
    id: str = ""
    """Id of the first job: the answer's, which `/debug/requests/{id}` takes."""
    params: SamplingParams | None = None
    """Sampling parameters of the first job."""
    choices: int = 0
    """Number of choices of all jobs that were queued."""
    cached_tokens: int = 0
    queued_at: float = 0.0
    started_at: float = 0.0
    ended_at: float = 0.0
    finishes: list[str] = msgspec.field(default_factory=list)
    """Finish reasons of the first `MAX_LISTED` choices."""
    history: list[tuple[float, str, int]] = msgspec.field(default_factory=list)
    """Events of the first choice: (time, admitted, chunk or retracted, tokens)."""
    status: int = 0
    error: str = ""
    """Code of the request's error."""
    key: str = ""
    """Key of the request's lines in the dump; empty: it has none."""
    _holders: int = 1

    def receive(self, body: bytes) -> None:
        """See `Usage.receive`."""
        if any(reporter.keeps_bodies for reporter in self.reporters):
            self.body = body

    def ask(self, body: object) -> None:
        """See `Usage.ask`."""
        model, stream = getattr(body, "model", None), getattr(body, "stream", None)
        self.model = model if isinstance(model, str) else ""
        self.stream = stream if isinstance(stream, bool) else None

    def begin(self, run: Run) -> None:
        """See `Usage.begin`."""
        self.choices += run.choices
        if self.params is not None:
            return
        self.params = run.params
        first = run.request(0)
        self.id, self.queued_at = first.id.rpartition("-")[0], first.arrival
        for reporter in self.reporters:
            reporter.accepted(self)
        self.body = b""

    def add(self, run: Run) -> None:
        """See `Usage.add`."""
        super().add(run)
        self.cached_tokens += run.cached
        for index in range(run.choices):
            self.started_at = _earlier(self.started_at, run.request(index).started_at)
            if len(self.finishes) < MAX_LISTED:
                finish = run.finish(index)  # none yet: its client has gone, and it was aborted
                self.finishes.append((FinishReason.ABORT if finish is None else finish.reason).value)
        if not self.history:
            self.history = run.request(0).history[:MAX_LISTED]

    def fail(self, fault: Fault) -> None:
        """See `Usage.fail`."""
        self.error = fault.code or fault.type

    def hold(self) -> None:
        """See `Usage.hold`."""
        self._holders += 1

    def end(self, status: int | None = None) -> None:
        """See `Usage.end`. The last one reports."""
        self.status = self.status if status is None else status
        self._holders -= 1
        if self._holders:
            return
        self.ended_at = monotonic()
        if not self.error and self.failed:
            self.error = "engine_failed"  # the frames of its dialect told the client
        if not self.error and self.status == CLIENT_GONE:
            self.error = "client_disconnected"
        for reporter in self.reporters:
            reporter.ended(self)

    @property
    def failed(self) -> bool:
        """Whether the engine failed while the request ran."""
        return FinishReason.ERROR.value in self.finishes


def readable(sent: str) -> str:
    """A header with U+FFFD for bytes that are not UTF-8. aiohttp passes them as surrogates, which nothing
    encodes."""
    return sent.encode(errors="surrogateescape").decode(errors="replace")


def _earlier(known: float, time: float) -> float:
    return min(known or time, time or known)


REPORTERS = web.AppKey("reporters", list[Reporter])
REPORTED = web.AppKey("reported", Mapping[tuple[str, str], str])
"""Operations of the routes that run the model, by method and path."""

_OPERATIONS = {
    "messages": "chat",
    "responses": "chat",
    "completions": "text_completion",
    "generate": "text_completion",
    "invocations": "text_completion",
    "pooling": "embeddings",
    "encode": "embeddings",
}


def operation_of(path: str) -> str:
    """`gen_ai.operation.name` of a route; the last part of its path where the conventions have no word."""
    last = path.rpartition("/")[2]
    return "chat" if "/chat" in path else _OPERATIONS.get(last, last)


def usage_of(request: web.Request) -> Usage:
    """The object that collects a request's usage: a `Report` if a reporter is configured."""
    reporters, resource = request.app[REPORTERS], request.match_info.route.resource
    if not reporters or resource is None:
        return Usage()
    operation = request.app[REPORTED].get((request.method, resource.canonical))
    if operation is None:
        return Usage()
    now, created = monotonic(), time.time()
    return Report(request=request, operation=operation, reporters=reporters, arrived=now, created=created)
