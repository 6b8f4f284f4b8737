"""Timelines of requests: the time that each phase took."""

from __future__ import annotations

import pytest

from app.engine.metrics import Recorder
from app.engine.timeline import KEPT, Timelines
from core.schedule.scheduler import Confirmed
from core.types import FinishReason
from tests.rigs.scheduler import Harness


def test_a_timeline_tells_waiting_chunks_retraction_and_batch() -> None:
    h = Harness(step_tokens=16, rows=1)
    recorder = Recorder(h.clock, h.executor.capabilities)
    timelines = Timelines(h.clock)
    h.request(range(50, 58), max_tokens=2)
    request = h.request(range(40), max_tokens=3)
    timelines.open(("", "job"), recorder, [request], h.clock.now, 0.25, 0.5)
    while request.finish is None:
        h.clock.now += 1.0
        h.turn()
        recorder.step(Confirmed([], [], {}, {}, [], rows=2), 0.1)
        if len(request.output) == 1 and not request.retractions:
            request.first_token_at = h.clock.now
            h.scheduler.retract(request)
    live = timelines.of(("", "job"))
    assert live is not None and live["running"] is True
    timelines.close(("", "job"))
    told = timelines.of(("", "job"))
    assert told is not None
    assert (told["running"], told["encoding_ms"], told["grammar_ms"]) == (False, 250.0, 500.0)
    assert told["mean_rows"] == 2.0
    choices = told["choices"]
    assert isinstance(choices, list)
    choice = choices[0]
    assert (choice["prompt_tokens"], choice["output_tokens"], choice["retractions"]) == (40, 3, 1)
    assert choice["finish_reason"] == FinishReason.LENGTH.value
    assert choice["queue_ms"] > 0
    events = [(event["event"], event["tokens"]) for event in choice["events"]]
    assert events[:4] == [("admitted", 0), ("chunk", 16), ("chunk", 16), ("chunk", 8)]
    assert events[4:] == [("retracted", 1), ("admitted", 40), ("chunk", 2)]  # one token was in flight


def test_a_choice_that_ended_before_the_others_decodes_no_longer() -> None:
    h = Harness()
    recorder, timelines = Recorder(h.clock, h.executor.capabilities), Timelines(h.clock)
    h.clock.now = 1.0
    choices = [h.request(range(4), max_tokens=1) for _ in range(2)]
    timelines.open(("", "job"), recorder, choices, h.clock.now, 0.0, 0.0)
    while any(choice.finish is None for choice in choices):
        h.turn()
    for choice, seconds in zip(choices, (1.0, 4.0), strict=True):
        recorder.first_token(choice)
        h.clock.now += seconds
        recorder.ended(choice)
    timelines.close(("", "job"))
    told = timelines.of(("", "job"))
    assert told is not None and isinstance(told["choices"], list)
    assert [choice["decode_ms"] for choice in told["choices"]] == [1000.0, 4000.0]
    assert told["total_ms"] == 5000.0


def test_what_ended_long_ago_is_forgotten() -> None:
    h = Harness()
    timelines = Timelines(h.clock)
    recorder, request = Recorder(h.clock, h.executor.capabilities), h.request(range(4))
    for number in range(KEPT + 1):
        timelines.open(("", str(number)), recorder, [request], 0.0, 0.0, 0.0)
        timelines.close(("", str(number)))
    assert timelines.of(("", "0")) is None
    assert timelines.of(("", str(KEPT))) is not None
    assert timelines.of(("another", str(KEPT))) is None


@pytest.mark.parametrize("id", ["never", ""])
def test_an_unknown_id_is_none(id: str) -> None:
    h = Harness()
    assert Timelines(h.clock).of(("", id)) is None
