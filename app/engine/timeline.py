"""Timings of recent requests: queue, prefill, decode."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import NamedTuple

from app.engine.metrics import Recorder
from core.clock import Clock
from core.request import Request, State
from core.request.request import Drafts
from core.types import Finish

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


class _Choice(NamedTuple):
    """The state of a request, without its tokens."""

    state: State
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    arrival: float
    started_at: float
    first_token_at: float
    ended_at: float
    retractions: int
    finish: Finish | None
    history: list[tuple[float, str, int]]
    drafts: Drafts


class _Moment(NamedTuple):
    """The state of a job at the time `now`. It is formatted when a client asks, which is rare."""

    job: _Entry
    """The job's entry, without its requests."""
    now: float
    steps: int
    """Steps since the job's start; `rows` are counted from there too."""
    rows: int
    choices: list[_Choice]


JobKey = tuple[str, str]
"""Tenant and job id: clients choose ids, and those of one tenant may be those of another."""


class Timelines:
    """The jobs that run and the last thousand that ended. Owner: event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: dict[JobKey, _Entry] = {}
        self._ended: OrderedDict[JobKey, _Moment] = OrderedDict()

    def open(
        self,
        key: JobKey,
        recorder: Recorder,
        requests: list[Request],
        arrived: float,
        encoding: float,
        grammar: float,
    ) -> None:
        """Record a queued job: it came at `arrived`; `encoding` and `grammar` are the seconds of either."""
        steps, rows, created = recorder.steps, recorder.rows, int(time.time())
        self._open[key] = _Entry(recorder, requests, arrived, encoding, grammar, steps, rows, created)

    def close(self, key: JobKey) -> None:
        """Record that the last choice of a job ended. What is kept of it holds no prompt."""
        self._ended[key] = self._moment(self._open.pop(key))
        if len(self._ended) > KEPT:
            self._ended.popitem(last=False)

    def of(self, key: JobKey) -> dict[str, object] | None:
        """Timings of a job, in milliseconds; None when it is not among the recorded jobs."""
        if (entry := self._open.get(key)) is not None:
            return _described(key[1], self._moment(entry), running=True)
        ended = self._ended.get(key)
        return None if ended is None else _described(key[1], ended, running=False)

    def _moment(self, entry: _Entry) -> _Moment:
        steps, rows = entry.recorder.steps - entry.steps, entry.recorder.rows - entry.rows
        choices = [_choice(request) for request in entry.requests]
        return _Moment(entry._replace(requests=[]), self._clock(), steps, rows, choices)


def _choice(request: Request) -> _Choice:
    return _Choice(
        request.state,
        len(request.prompt),
        request.cached,
        len(request.output),
        request.arrival,
        request.started_at,
        request.first_token_at,
        request.ended_at,
        request.retractions,
        request.finish,
        request.history,
        request.drafts,
    )


def _described(id: str, moment: _Moment, running: bool) -> dict[str, object]:
    job, steps = moment.job, moment.steps
    drafts = job.recorder.drafts is not None
    return {
        "id": id,
        "created": job.created,
        "running": running,
        "total_ms": _ms(moment.now - job.arrived),
        "encoding_ms": _ms(job.encoding),
        "grammar_ms": _ms(job.grammar),
        "steps": steps,
        "mean_rows": round(moment.rows / steps, 1) if steps else 0.0,
        "choices": [_described_choice(choice, moment.now, drafts) for choice in moment.choices],
    }


def _described_choice(choice: _Choice, now: float, drafts: bool) -> dict[str, object]:
    started, first = choice.started_at, choice.first_token_at
    end = choice.ended_at or now  # other choices of its job may run on
    return {
        "state": choice.state.name.lower(),
        "prompt_tokens": choice.prompt_tokens,
        "cached_tokens": choice.cached_tokens,
        "output_tokens": choice.output_tokens,
        **(_drafts(choice.drafts) if drafts else {}),
        "queue_ms": _ms((started or end) - choice.arrival),
        "prefill_ms": _ms((first or end) - started) if started else None,
        "decode_ms": _ms(end - first) if first else None,
        "retractions": choice.retractions,
        "finish_reason": choice.finish.reason.value if choice.finish else None,
        "events": [
            {"at_ms": _ms(when - choice.arrival), "event": what, "tokens": tokens}
            for when, what, tokens in choice.history
        ],
    }


def _drafts(drafts: Drafts) -> dict[str, object]:
    """Steps that verified drafts, and the drafts, with those behind a stop."""
    return {
        "verify_steps": drafts.steps,
        "drafted_tokens": drafts.drafted,
        "accepted_tokens": drafts.accepted,
    }


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
