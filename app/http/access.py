"""The access log: what a request used, and its line."""

from __future__ import annotations

from contextvars import ContextVar

import msgspec
from aiohttp import web

from app.context import holding
from app.engine.job import Run
from app.http.errors import Fault
from app.http.keys import REQUEST_ID
from app.http.tenant import permit

CLIENT_GONE = 499
"""Status in the log for a client that disconnected; never sent."""


class Usage(msgspec.Struct):
    """Usage of one request's jobs, as far as they have ended."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    first_token_at: float = 0.0
    """Time of the first token on the engine's clock; 0: none yet."""
    served: str = ""
    """Name of the model or adapter that answers."""

    # Events in a request's life; only reports keep them (`app/http/report.py`).

    def receive(self, body: bytes) -> None:
        """The request's body has arrived."""

    def ask(self, body: object) -> None:
        """The request's body is decoded."""

    def begin(self, run: Run) -> None:
        """A job is queued."""

    def fail(self, fault: Fault) -> None:
        """The client gets an error, also in the middle of a stream."""

    def hold(self) -> None:
        """The request goes on after its answer, until one more `end`."""

    def end(self, status: int | None = None) -> None:
        """The request was answered with a status, or what held it has ended."""

    def add(self, run: Run) -> None:
        """Add the usage of a job that has ended."""
        self.prompt_tokens += len(run.prompt)
        self.output_tokens += run.output_tokens
        if first := run.first_token_at:
            self.first_token_at = min(first, self.first_token_at or first)


_usage: ContextVar[Usage | None] = ContextVar("usage", default=None)


def current_usage() -> Usage | None:
    """Usage of the current request, if there is one (`app.offline` has none)."""
    return _usage.get()


def begun(run: Run) -> None:
    """Count the prompt of a job that was queued to the current request's API key."""
    permit().use(prompt=len(run.prompt))
    if (usage := _usage.get()) is not None:
        usage.begin(run)


def used(run: Run) -> None:
    """Record the usage of a job that has ended: for the current request, if there is one, and for its API
    key. Tokens that were not delivered because the client left count too: the device has computed them."""
    permit().use(output=run.output_tokens)
    if (usage := _usage.get()) is not None:
        usage.add(run)


def measured(usage: Usage) -> holding[Usage]:
    """Count what this context uses. The numbers and no jobs are kept: tasks that a request leaves behind,
    as of a batch, have its context as long as they run."""
    return holding(_usage, usage)


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One answer. Times are milliseconds; fields about the engine are left out if it was not asked."""

    client: str
    """Address of the connection, which may be a proxy's: headers that name another can be forged."""
    method: str
    path: str
    status: int
    total_ms: float
    request_id: str
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    first_token_ms: float | None = None

    def __str__(self) -> str:
        """The line in text."""
        line = f"{self.method} {self.path} {self.status} {self.total_ms:.1f} ms {self.request_id}"
        line = f"{line} from {self.client}"
        if self.prompt_tokens is not None:
            line += f", {self.prompt_tokens} prompt and {self.output_tokens} output tokens"
        if self.first_token_ms is not None:
            line += f", first after {self.first_token_ms:.1f} ms"
        return line


def entry(request: web.Request, status: int, usage: Usage, started: float, now: float) -> Entry:
    """The entry of a request that came at `started`, on the engine's clock."""
    asked, first = usage.prompt_tokens > 0, usage.first_token_at
    return Entry(
        client=escape(request.remote or "-"),
        method=escape(request.method),
        path=escape(request.path),
        status=status,
        total_ms=_milliseconds(now - started),
        request_id=request[REQUEST_ID],
        prompt_tokens=usage.prompt_tokens if asked else None,
        output_tokens=usage.output_tokens if asked else None,
        first_token_ms=_milliseconds(first - started) if first else None,
    )


def escape(text: str) -> str:
    """`text` as one line of printable ASCII, at most 200 characters, so that log lines cannot be forged."""
    return text[:200].encode("unicode_escape").decode("ascii")


def _milliseconds(seconds: float) -> float:
    return round(1e3 * seconds, 1)
