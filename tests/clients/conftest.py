"""The server that `tests/app` uses, and how to make it fail once."""

from __future__ import annotations

from app.engine.job import Job, Sink
from core.errors import LoomError
from tests.app.conftest import Server, server, start
from tests.fakes.engine import FakeRun

__all__ = ["refuse", "server", "start"]


def refuse(server: Server, *errors: LoomError) -> list[LoomError]:
    """The next requests are refused with these errors, one each; returns those still to come."""
    coming = list(errors)
    begin = server.engine.start

    async def start(job: Job, sink: Sink) -> FakeRun:
        if coming:
            raise coming.pop(0)
        return await begin(job, sink)

    server.engine.start = start
    return coming
