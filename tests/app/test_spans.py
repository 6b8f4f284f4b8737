"""OpenTelemetry: one span for each request that runs the model, whatever becomes of it, and no fault of a
collector reaches a client."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator

import pytest

from app import settings
from app.engine.job import Piece
from app.http.report import REPORTERS
from core.config import ServeConfig
from core.errors import ConfigError
from core.types import Finish, FinishReason
from tests.rigs.collector import Collector, Span, collecting
from tests.rigs.server import Server, Start, know
from tests.rigs.usage import usage_error
from tests.rigs.wait import until

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra otel")

PROMPT = [5, 6, 7, 8]
HI = [{"role": "user", "content": "hi"}]
TRACE, PARENT = "ab" * 16, "cd" * 8


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    async with collecting() as collector:
        yield collector


@pytest.fixture
async def server(start: Start, collector: Collector) -> Server:
    return await start(ServeConfig(otlp_traces_endpoint=collector.url))


async def flushed(server: Server, collector: Collector) -> list[Span]:
    """Spans of requests, after the flush at the end of a server: no later one is exported."""
    for reporter in server.app[REPORTERS]:
        await reporter.close()
    return collector.roots()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_a_span_with_its_phases(
    featured: Server, collector: Collector, stream: bool
) -> None:
    body = {"model": "org/tiny", "messages": HI, "max_tokens": 8, "ignore_eos": True, "stream": stream}
    async with featured.http.post(
        "/v1/chat/completions", json={**body, "temperature": 0.5, "seed": 7}, headers={"X-Request-Id": "mine"}
    ) as response:
        assert response.status == 200
        text = await response.text()
    *_, span = await flushed(featured, collector)
    told = dict(span.attributes)
    assert (span.name, span.service, span.parent, span.failed) == ("chat org/tiny", "loom", "", False)
    assert told.pop("gen_ai.response.id") in text
    times = [told.pop(f"gen_ai.latency.{name}") for name in ("time_in_queue", "time_in_model_prefill")]
    times += [told.pop(f"gen_ai.latency.{name}") for name in ("time_in_model_decode",)]
    first, total = told.pop("gen_ai.latency.time_to_first_token"), told.pop("gen_ai.latency.e2e")
    assert all(time >= 0 for time in times)
    assert sum(times) <= total + 1e-6
    assert first <= total
    assert told.pop("gen_ai.usage.input_tokens") > 2
    assert told == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "loom",
        "gen_ai.request.model": "org/tiny",
        "gen_ai.request.stream": stream,
        "gen_ai.request.id": "mine",
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.seed": 7,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.response.model": "org/tiny",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "client.address": "127.0.0.1",
    }
    below = collector.below(span)
    assert [phase.name for phase in below] == ["queue", "prefill", "decode"]
    assert [event for phase in below for event in phase.events] == ["admitted", "chunk"]
    edges = [edge for phase in below for edge in (phase.start, phase.end)]
    assert edges == sorted(edges)
    assert span.start <= edges[0]
    assert edges[-1] == span.end


async def test_the_callers_trace_goes_on_where_it_is_sampled(server: Server, collector: Collector) -> None:
    for flag in ("00", "01"):
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-{flag}", "tracestate": "vendor=1"}
        body = {"prompt": PROMPT, "max_tokens": 2}
        async with server.http.post("/v1/completions", json=body, headers=headers) as response:
            assert response.status == 200
    (span,) = await flushed(server, collector)
    assert (span.trace, span.parent) == (TRACE, PARENT)
    assert all(phase.trace == TRACE for phase in collector.below(span))


async def test_headers_that_are_not_utf8_cost_no_request(server: Server) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2}
    for name in ("baggage", "traceparent", "tracestate"):
        headers = {name: "\udcff=a"}  # the byte 0xff
        async with server.http.post("/v1/completions", json=body, headers=headers) as response:
            assert response.status == 200


async def test_samplers_and_names_are_set_by_the_standard_variables(
    start: Start, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    server = await start(ServeConfig(otlp_traces_endpoint=f"{collector.url}/v1/traces"))
    body = {"prompt": PROMPT, "max_tokens": 2}
    await server.post("/v1/completions", body)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    async with server.http.post("/v1/completions", json=body, headers=headers) as response:
        assert response.status == 200
    (span,) = await flushed(server, collector)
    assert (span.service, span.trace) == ("ours", TRACE)


async def test_what_is_refused_is_a_span_with_its_error(start: Start, collector: Collector) -> None:
    server = await start(ServeConfig(otlp_traces_endpoint=collector.url, api_key=("secret",)))
    key = {"Authorization": "Bearer secret"}
    sent = [
        ({"prompt": PROMPT}, {}),
        ({"prompt": PROMPT, "temperature": -1}, key),
        ({"model": "other", "prompt": PROMPT}, key),
    ]
    for body, headers in sent:
        async with server.http.post("/v1/completions", json=body, headers=headers) as response:
            assert response.status >= 400
    async with server.http.get("/v1/models", headers=key) as response:
        assert response.status == 200, "it runs no model: no span"
    spans = await flushed(server, collector)
    assert [(span.name, span.attributes["error.type"]) for span in spans] == [
        ("text_completion", "invalid_api_key"),
        ("text_completion org/tiny", "invalid_request_error"),
        ("text_completion other", "model_not_found"),
    ]
    assert not any(span.failed or collector.below(span) for span in spans), "these are the client's faults"
    assert "secret" not in str(collector.spans)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_span_ends_when_its_client_leaves(server: Server, collector: Collector, stream: bool) -> None:
    server.engine.manual = True
    body = {"prompt": PROMPT, "max_tokens": 8, "stream": stream}
    asked = asyncio.ensure_future(server.post("/v1/completions", body))
    await until(lambda: bool(server.engine.runs))
    asked.cancel()
    await until(lambda: not server.connections)
    (span,) = await flushed(server, collector)
    told = span.attributes
    assert (told["http.response.status_code"], told["error.type"]) == (499, "client_disconnected")
    assert told["gen_ai.response.finish_reasons"] == ["abort"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_of_the_engine_is_the_spans(
    server: Server, collector: Collector, stream: bool, path: str
) -> None:
    server.engine.fail_at = 2
    body = {"prompt": PROMPT, "messages": HI, "max_tokens": 8, "stream": stream}
    async with server.http.post(path, json=body) as response:
        assert response.status == (200 if stream else 500)
        await response.read()
    (span,) = await flushed(server, collector)
    assert span.failed
    assert span.attributes["error.type"] == "engine_failed"
    assert span.attributes["gen_ai.response.finish_reasons"] == ["error"]


async def test_an_answer_that_ends_before_a_second_call_was_not_aborted(
    server: Server, collector: Collector
) -> None:
    """The engine's request is aborted then, its client has all that it asked for."""
    know(server)
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    server.engine.scripts = [[call, "\n", *call, *"\nMore."]]
    tools = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
    body = {"messages": HI, "tools": tools, "parallel_tool_calls": False}
    status, answer = await server.post("/v1/chat/completions", body)
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "tool_calls")
    assert server.engine.runs[0].ended == [0]
    (span,) = await flushed(server, collector)
    assert span.attributes["gen_ai.response.finish_reasons"] == ["stop"]


@pytest.mark.parametrize("ending", ["cancelled", "made", "server ends"])
async def test_a_response_in_the_background_ends_its_span_when_it_ends(
    server: Server, collector: Collector, ending: str
) -> None:
    server.engine.manual = True
    made = await server.ask("/v1/responses", {"input": "hi", "background": True, "store": True})
    (run,) = server.engine.runs
    if ending == "cancelled":
        async with server.http.post(f"/v1/responses/{made['id']}/cancel") as response:
            assert response.status == 200
    elif ending == "made":
        run.push(0, Piece("Hello", [72], None, Finish(FinishReason.STOP)))
    await server.app.cleanup()
    (span,) = collector.roots()
    told = span.attributes
    assert told["gen_ai.response.finish_reasons"] == ["stop" if ending == "made" else "abort"]
    assert told.get("gen_ai.usage.output_tokens") == (1 if ending == "made" else 0)


async def test_a_collector_that_is_down_costs_one_line_and_no_request(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    server = await start(ServeConfig(otlp_traces_endpoint="http://127.0.0.1:1"))
    with caplog.at_level(logging.WARNING):
        for _ in range(12):  # more spans than the queue takes
            assert (await server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2}))[0] == 200
        await server.app[REPORTERS][0].close()
    (line,) = caplog.messages
    assert line.startswith("no spans reach http://127.0.0.1:1/v1/traces: ")


async def test_without_the_extra_the_start_names_it(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "app.http.spans", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"--otlp-traces-endpoint .* pip install 'loom-serve\[otel\]'"):
        await start(ServeConfig(otlp_traces_endpoint="http://localhost:4318"))


def test_an_endpoint_of_grpc_is_refused_with_the_port_of_http(capsys: pytest.CaptureFixture[str]) -> None:
    said = usage_error(capsys, settings.parse, ["--otlp-traces-endpoint", "localhost:4317"])
    assert "--otlp-traces-endpoint" in said
    assert "http://" in said
    assert "4318" in said
