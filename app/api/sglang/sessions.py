"""`/open_session`, `/close_session`, and requests in a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from app.api.request.routing import Routes
from app.api.request.sampling import job_id
from app.api.request.schema import SessionParams
from app.api.sglang.session_tree import MAX_SESSIONS, Sessions
from app.engine.failure import failure
from app.engine.job import Generator, Job, Piece, Run, Sink
from app.http.answer import AnswerSpec
from app.http.tenant import Keys, tenant
from app.service import Loaded
from core.clock import Clock
from core.errors import field_error
from core.types import FinishReason, Ints

ROUTES = Routes()


class TenantSessions:
    """The sessions of each tenant, with an equal share for each key there is. Owner: event loop."""

    def __init__(self, keys: Keys, clock: Clock) -> None:
        self._keys = keys
        self._clock = clock
        self._by_tenant: dict[str, Sessions] = {}

    def mine(self) -> Sessions:
        """The sessions of the current request's tenant. Sessions of keys that are gone are removed."""
        tenants = self._keys.tenants
        for gone in self._by_tenant.keys() - {*tenants, tenant()}:
            del self._by_tenant[gone]
        mine = self._by_tenant.setdefault(tenant(), Sessions(self._clock))
        mine.limit = max(MAX_SESSIONS // len(tenants), 1)
        return mine


SESSIONS = web.AppKey("sessions", TenantSessions)


class OpenBody(msgspec.Struct, kw_only=True):
    """`capacity_of_str_len`, which SGLang's clients send, has no meaning here and is ignored."""

    session_id: str | None = None
    timeout: float | None = None


class CloseBody(msgspec.Struct, kw_only=True):
    """`/close_session`."""

    session_id: str | None = None


@ROUTES.post(OpenBody, "/open_session", optional=True, string=True, errors=(429,))
async def open_session(request: web.Request, body: OpenBody, loaded: Loaded) -> object:
    """The id of a new session, as a JSON string."""
    name = job_id(body.session_id, "", "session_id")
    return request.app[SESSIONS].mine().open(name or None, body.timeout)


@ROUTES.post(CloseBody, "/close_session", example="session_id", has="success")
async def close_session(request: web.Request, body: CloseBody, loaded: Loaded) -> object:
    """Forget a session; one that is not there is no error, as in SGLang."""
    if not body.session_id:
        raise field_error("session_id", "is missing")
    return {"success": request.app[SESSIONS].mine().close(body.session_id)}


class TurnRecorder(Generator):
    """A `Generator` whose complete answer becomes a turn of a session. Owner: event loop."""

    def __init__(self, engine: Generator, end: Callable[[list[int]], None]) -> None:
        """`end` gets the tokens of the answer."""
        self._engine = engine
        self._end = end

    async def start(self, job: Job, sink: Sink) -> Run:
        """See `Generator.start`."""
        tokens: list[int] = []

        def watched(index: int, piece: Piece) -> None:
            tokens.extend(piece.tokens)
            finish = piece.finish
            if finish is not None and failure(finish) is None and finish.reason is not FinishReason.ABORT:
                self._end(tokens)
            sink(index, piece)

        return await self._engine.start(job, watched)


@contextmanager
def in_session(
    sessions: Sessions, params: SessionParams, spec: AnswerSpec[Any], ids: Ints, loaded: Loaded
) -> Iterator[AnswerSpec[Any]]:
    """`spec` whose one job, with the prompt `ids`, comes after the turn that it continues. A turn that does
    not complete is removed."""
    (job,) = spec.jobs
    bos = loaded.tokenizer.encode("", True)  # whatever a text begins with
    prompt = sessions.begin(params, job.id, ids, int(bos[0]) if len(bos) else None)
    id = params.id or ""
    engine = TurnRecorder(spec.engine, partial(sessions.end, id, job.id))
    try:
        yield msgspec.structs.replace(spec, engine=engine, jobs=[msgspec.structs.replace(job, prompt=prompt)])
    finally:
        sessions.drop(id, job.id)
