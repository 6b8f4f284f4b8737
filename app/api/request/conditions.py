"""The replica, deadline and first-token target of a request: fields and headers that every route accepts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import cast

import msgspec
from aiohttp import web

from app.engine.job import Generator, Job, Run, Sink
from app.engine.submit import Submitter
from app.service import Loaded
from core.clock import monotonic
from core.errors import field_error

RANK = "X-Data-Parallel-Rank"
TTFT = "x-llm-d-slo-ttft-ms"
MAX_TIMEOUT = 7 * 86_400.0
"""Seconds."""
_RANK = re.compile("[0-9]{1,9}")
_MILLISECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


class _Conditional:
    """A `Generator` that adds fields to its jobs. Owner: event loop."""

    def __init__(self, engine: Generator, fields: Mapping[str, float]) -> None:
        self._engine = engine
        self._fields = fields

    async def start(self, job: Job, sink: Sink) -> Run:
        """See `Generator.start`."""
        return await self._engine.start(msgspec.structs.replace(job, **self._fields), sink)


def on_conditions(loaded: Loaded, request: web.Request, body: object) -> Loaded:
    """The model with an engine whose jobs run under the conditions of the request and of the server. Raises
    `RequestError`."""
    now, fields = monotonic(), dict[str, float]()
    if (replica := _replica(request, body)) is not None:
        fields["replica"] = replica
    if (timeout := getattr(body, "timeout", None)) is not None:
        if not 0 < timeout <= MAX_TIMEOUT:
            raise field_error("timeout", f"must be above 0 and at most {MAX_TIMEOUT:g} seconds")
        fields["deadline"] = now + timeout
    if limit := _first_token_limit(request, loaded.settings.ttft_slo):
        fields["due"] = now + limit / 1e3
    if not fields:
        return loaded
    return msgspec.structs.replace(loaded, engine=cast(Submitter, _Conditional(loaded.engine, fields)))


def _replica(request: web.Request, body: object) -> int | None:
    """The replica that a request names, by SGLang's fields or vLLM's header."""
    for name in ("routed_dp_rank", "data_parallel_rank"):
        if (asked := getattr(body, name, None)) is not None:
            return int(asked)
    sent = request.headers.get(RANK)
    if sent is None:
        return None
    if not _RANK.fullmatch(sent):
        raise field_error(RANK, f"must be the number of a replica, got {sent[:100]!r}")
    return int(sent)


def _first_token_limit(request: web.Request, usual: float) -> float:
    """The limit of the time to first token in milliseconds, by llm-d's header; 0: no limit."""
    sent = request.headers.get(TTFT)
    if sent is None:
        return usual
    if not _MILLISECONDS.fullmatch(sent):
        raise field_error(TTFT, f"must be a number of milliseconds, 0 for no limit, got {sent[:100]!r}")
    return float(sent)
