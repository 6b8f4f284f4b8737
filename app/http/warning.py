"""What a client should know of a request that was taken all the same: the header `x-loom-warning`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

HEADER = "X-Loom-Warning"

MAX_WARNINGS = 8
MAX_CHARS = 300
"""Of one. Clients and proxies take headers of 8 KB altogether."""

_said: ContextVar[list[str] | None] = ContextVar("warnings", default=None)


def warn(text: str) -> None:
    """Tell the client of the request at hand, once for equal texts. Nobody is told where there is no request
    (a line of a batch, `app.offline`), or when its answer has begun."""
    said = _said.get()
    if said is not None and text not in said and len(said) < MAX_WARNINGS:
        said.append(text)


@contextmanager
def warnings() -> Iterator[list[str]]:
    """The warnings of one request, as they come."""
    said: list[str] = []
    token = _said.set(said)
    try:
        yield said
    finally:
        _said.reset(token)


def header_value(said: list[str]) -> str:
    """All of them on one line of printable ASCII: they may quote what a client sent."""
    return "; ".join(text.encode("unicode_escape").decode("ascii")[:MAX_CHARS] for text in said)
