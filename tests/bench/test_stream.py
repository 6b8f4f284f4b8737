"""Events arrive at times that the tests set: nothing here sleeps or measures."""

from __future__ import annotations

import json

import pytest

from bench.load.records import Record
from bench.load.stream import Stream
from tests.rigs.completions_server import delta, text


def sse(*events: str) -> bytes:
    return b"".join(f"data: {event}\n\n".encode() for event in events)


def usage(out: int, prompt: int = 4, cached: int | None = None) -> str:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return json.dumps(
        {"choices": [], "usage": {"completion_tokens": out, "prompt_tokens": prompt, **details}}
    )


def reader(
    endpoint: str = "completions", out: int | None = None, prompt: int | None = None, keep: bool = False
) -> Stream:
    return Stream(Record(index=0, sent=10.0), endpoint, (out, prompt), keep)


def test_times_tokens_and_usage_of_a_good_answer() -> None:
    stream = reader(out=3, prompt=4)
    for now, event in [(11.0, text("a")), (11.5, text("b")), (12.5, text("c")), (12.6, text("", "length"))]:
        stream.feed(sse(event), now)
    stream.feed(sse(usage(3, cached=2), "[DONE]"), 13.0)
    stream.close(13.5, whole=True)
    record = stream.record
    assert record.bad is None
    assert record.times == [11.0, 11.5, 12.5]
    assert (record.out, record.prompt, record.cached, record.finish) == (3, 4, 2, "length")
    assert (record.ttft, record.e2e, record.tpot) == (1.0, 3.0, 1.0)


def test_events_may_be_split_at_any_byte() -> None:
    data = sse(text('say "text":"" and \\'), text("b"), text("c", "stop"), usage(3), "[DONE]")
    for step in (1, 2, 7, len(data)):
        stream = reader()
        for at in range(0, len(data), step):
            stream.feed(data[at : at + step], float(at // step))
        stream.close(1e9, whole=True)
        assert (stream.record.bad, len(stream.record.times), stream.record.out) == (None, 3, 3), step


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_carriage_returns_comments_and_other_fields_are_allowed(step: int) -> None:
    events = [": ping", f"event: x\r\nid: 3\r\ndata: {text('a')}", f"data:{text('b')}", "data: [DONE]"]
    data = "".join(f"{event}\r\n\r\n" for event in events).encode()
    stream = reader()
    for at in range(0, len(data), step):
        stream.feed(data[at : at + step], 11.0)
    stream.close(12.0, whole=True)
    assert (stream.record.bad, stream.record.times) == (None, [11.0, 11.0])


def test_a_role_is_not_a_token() -> None:
    stream = reader("chat")
    stream.feed(sse(delta("", role="assistant")), 10.1)
    stream.feed(sse(delta("Hi")), 15.0)
    stream.feed(sse(delta("!")), 15.2)
    stream.feed(sse(delta(None, finish="stop"), "[DONE]"), 15.3)
    stream.close(15.3, whole=True)
    assert stream.record.times == [15.0, 15.2] and stream.record.ttft == 5.0


def test_a_role_with_text_is_a_token() -> None:
    stream = reader("chat")
    stream.feed(sse(delta("Hi", role="assistant")), 12.0)
    assert stream.record.times == [12.0]


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_reasoning_and_tool_calls_are_tokens(key: str) -> None:
    stream = reader("chat")
    stream.feed(sse(json.dumps({"choices": [{"delta": {key: "hm"}, "finish_reason": None}]})), 11.0)
    call = {"index": 0, "function": {"arguments": "{"}}
    stream.feed(
        sse(json.dumps({"choices": [{"delta": {"tool_calls": [call]}, "finish_reason": None}]})), 12.0
    )
    assert stream.record.times == [11.0, 12.0]


def test_held_back_text_is_a_token_and_the_end_alone_is_not() -> None:
    stream = reader()
    for now, event in [(11.0, text("a")), (12.0, text("")), (13.0, text("é")), (14.0, text("", "length"))]:
        stream.feed(sse(event), now)
    assert stream.record.times == [11.0, 12.0, 13.0]


def test_a_single_token_without_text_is_counted_at_its_end() -> None:
    stream = reader(out=1)
    stream.feed(sse(text("", "length"), usage(1), "[DONE]"), 11.0)
    stream.close(11.0, whole=True)
    assert (stream.record.bad, stream.record.times) == (None, [11.0])


def test_spaced_json_counts_the_same() -> None:
    stream = reader()
    spaced = [
        json.dumps(json.loads(text(word, finish)))
        for word, finish in (("a", None), ("b", None), ("", "stop"))
    ]
    stream.feed(sse(*spaced), 11.0)
    assert len(stream.record.times) == 2 and stream.record.finish == "stop"


def test_without_usage_events_are_counted() -> None:
    stream = reader(out=9, prompt=4)
    stream.feed(sse(text("a"), text("b"), "[DONE]"), 11.0)
    stream.close(11.0, whole=True)
    record = stream.record
    assert (record.usage, record.out, record.prompt, record.cached, record.bad) == (False, 2, 4, None, None)


@pytest.mark.parametrize(
    ("data", "whole", "bad"),
    [
        (sse(text("a"), text("b")), True, "no [DONE]"),
        (sse(text("a")) + b'data: {"cho', False, "truncated"),
        (
            sse(text("a"), '{"error": {"message": "out of pages", "code": 500}}', "[DONE]"),
            True,
            "stream error",
        ),
        (sse(text("a"), "{not json", "[DONE]"), True, "malformed event"),
        (sse(text("a"), '{"choices": 3}', "[DONE]"), True, "malformed event"),
        (b'data: {"choices":[{"text":"\xff\xfe"}]}\n\ndata: [DONE]\n\n', True, "malformed event"),
        (sse(usage(0), "[DONE]"), True, "no tokens"),
        (sse(text("a"), text("b", "abort"), "[DONE]"), True, "finish abort"),
        (sse(text("a"), usage(1), "[DONE]"), True, "token count"),
        (sse(text("a"), text("b"), usage(2, prompt=3), "[DONE]"), True, "token count"),
        (b"", True, "no [DONE]"),
    ],
)
def test_what_counts_as_bad(data: bytes, whole: bool, bad: str) -> None:
    stream = reader(out=2, prompt=4)
    stream.feed(data, 11.0)
    stream.close(12.0, whole)
    assert stream.record.bad == bad
    assert stream.record.end in (11.0, 12.0)


def test_the_first_error_is_recorded() -> None:
    stream = reader()
    stream.feed(sse('{"error": {"message": "first"}}', '{"error": "second"}'), 11.0)
    stream.close(12.0, whole=False)
    assert (stream.record.bad, stream.record.detail) == ("stream error", "first")


def test_a_last_event_without_a_blank_line_counts() -> None:
    stream = reader()
    stream.feed(sse(text("a")) + b"data: [DONE]", 11.0)
    stream.close(12.0, whole=True)
    assert stream.record.bad is None


def test_keep_collects_the_text() -> None:
    stream = reader("chat", keep=True)
    stream.feed(
        sse(delta("", role="assistant"), delta("Hel"), delta("lo"), delta(" \U0001f642", finish="stop")), 11.0
    )
    assert "".join(stream.pieces) == "Hello \U0001f642"


def test_an_http_error_has_the_status_and_the_message() -> None:
    stream = reader()
    stream.reject(429, b'{"error": {"message": "queue full"}}', 11.0)
    assert (stream.record.bad, stream.record.detail) == ("http 429", "queue full")
