"""Timings of recent requests: queue, prefill, decode."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import NamedTuple

from app.engine.metrics import Recorder
from core.clock import Clock
from core.request import Request

KEPT = 1000
"""Finished jobs that are remembered; each takes about a kilobyte."""


class _Entry(NamedTuple):
    """One job while it runs: when it came, seconds of encoding and of waiting for its grammar. `steps` and
    `rows` are the sums of its engine's recorder at its start."""

    recorder: Recorder
    requests: list[Request]
    arrived: float
    encoding: float
    grammar: float
    steps: int
    rows: int
    created: int


JobKey = tuple[str, str]
"""Tenant and job id: clients choose ids, and those of one tenant may be those of another."""


class Timelines:
    """The jobs that run and the last thousand that ended. Owner: event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: dict[JobKey, _Entry] = {}
        self._ended: OrderedDict[JobKey, dict[str, object]] = OrderedDict()

    def open(
        self,
        key: JobKey,
        recorder: Recorder,
        requests: list[Request],
        arrived: float,
        encoding: float,
        grammar: float,
    ) -> None:
        """A job was queued that came at `arrived`; seconds of encoding, of waiting for its grammar."""
        steps, rows, created = recorder.steps, recorder.rows, int(time.time())
        self._open[key] = _Entry(recorder, requests, arrived, encoding, grammar, steps, rows, created)

    def close(self, key: JobKey) -> None:
        """Its last choice ended. What is kept holds no prompt."""
        self._ended[key] = self._describe(key, self._open.pop(key), running=False)
        if len(self._ended) > KEPT:
            self._ended.popitem(last=False)

    def of(self, key: JobKey) -> dict[str, object] | None:
        """What is known of a job; None when it is not among them. Times are milliseconds."""
        entry = self._open.get(key)
        return self._ended.get(key) if entry is None else self._describe(key, entry, running=True)

    def _describe(self, key: JobKey, entry: _Entry, running: bool) -> dict[str, object]:
        now = self._clock()
        steps, rows = entry.recorder.steps - entry.steps, entry.recorder.rows - entry.rows
        drafts = entry.recorder.drafts is not None
        return {
            "id": key[1],
            "created": entry.created,
            "running": running,
            "total_ms": _ms(now - entry.arrived),
            "encoding_ms": _ms(entry.encoding),
            "grammar_ms": _ms(entry.grammar),
            "steps": steps,
            "mean_rows": round(rows / steps, 1) if steps else 0.0,
            "choices": [_choice(request, now, drafts) for request in entry.requests],
        }


def _choice(request: Request, now: float, drafts: bool) -> dict[str, object]:
    started, first = request.started_at, request.first_token_at
    return {
        "state": request.state.name.lower(),
        "prompt_tokens": len(request.prompt),
        "cached_tokens": request.cached,
        "output_tokens": len(request.output),
        **(_drafts(request) if drafts else {}),
        "queue_ms": _ms((started or now) - request.arrival),
        "prefill_ms": _ms((first or now) - started) if started else None,
        "decode_ms": _ms(now - first) if first else None,
        "retractions": request.retractions,
        "finish_reason": request.finish.reason.value if request.finish else None,
        "events": [
            {"at_ms": _ms(when - request.arrival), "event": what, "tokens": tokens}
            for when, what, tokens in request.history
        ],
    }


def _drafts(request: Request) -> dict[str, object]:
    """Steps that verified drafts, and the drafts, with those behind a stop."""
    drafts = request.drafts
    return {
        "verify_steps": drafts.steps,
        "drafted_tokens": drafts.drafted,
        "accepted_tokens": drafts.accepted,
    }


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
