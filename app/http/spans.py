"""OpenTelemetry spans over OTLP/HTTP: one for each request that runs the model, its phases below it.
Only this file imports OpenTelemetry, and only `--otlp-traces-endpoint` imports this file."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from aiohttp import web
from opentelemetry import propagate, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.util.types import AttributeValue

from app.http.keys import REQUEST_ID
from app.http.report import Report, readable
from app.process import VERSION, begin
from core.request import SamplingParams

log = logging.getLogger(__name__)

FLUSH_SECONDS = 3.0
"""Seconds that the server waits at its end for the last spans."""


class HeaderGetter:
    """OpenTelemetry's `Getter` of a request's headers, without surrogates, on which propagators raise."""

    def get(self, carrier: web.Request, key: str) -> list[str] | None:
        """The values of a header."""
        return [readable(value) for value in carrier.headers.getall(key, ())] or None

    def keys(self, carrier: web.Request) -> list[str]:
        """The names of all."""
        return list(carrier.headers)


_GETTER = HeaderGetter()


class Spans:
    """A `Reporter` that exports spans. The event loop makes them (0.2 ms a request) and appends them to the
    SDK's bounded queue; the SDK's own thread exports them. Owner: event loop."""

    keeps_bodies = False

    def __init__(self, endpoint: str) -> None:
        """`endpoint` is the URL that spans are posted to. Everything else is set by the SDK's variables:
        `OTEL_TRACES_SAMPLER`, `OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_BSP_*`, …"""
        resource = Resource.create()
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "loom"}))
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._exporter = LoggingExporter(OTLPSpanExporter(endpoint), endpoint)
        self._processor = BatchSpanProcessor(self._exporter)
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("loom", VERSION)
        # `LoggingExporter` logs one line instead of theirs for every batch and every dropped span.
        for name in ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal"):
            logging.getLogger(name).setLevel(logging.CRITICAL)

    def accepted(self, report: Report) -> None:
        """See `Reporter.accepted`. Spans are made at the end, when everything is known."""

    def ended(self, report: Report) -> None:
        """See `Reporter.ended`."""
        context = propagate.extract(report.request, getter=_GETTER)
        span = self._tracer.start_span(
            f"{report.operation} {report.model[:200] or report.served}".rstrip(),
            context,
            trace.SpanKind.SERVER,
            start_time=_nanoseconds(report, report.arrived),
            attributes=attributes(report),
        )
        if span.is_recording():
            self._phases(report, span)
            if report.status >= 500 or report.failed or (report.error and report.status < 400):
                span.set_status(trace.StatusCode.ERROR, report.error)
        span.end(_nanoseconds(report, report.ended_at))

    def _phases(self, report: Report, span: trace.Span) -> None:
        """A span for each phase that the request reached, with the events of its first choice."""
        below = trace.set_span_in_context(span)
        for name, start, end in phases(report):
            phase = self._tracer.start_span(name, below, start_time=_nanoseconds(report, start))
            for at, event, tokens in report.history:
                if start <= at < end:
                    phase.add_event(event, {"loom.tokens": tokens}, _nanoseconds(report, at))
            phase.end(_nanoseconds(report, end))

    async def close(self) -> None:
        """See `Reporter.close`."""
        flushed = asyncio.wrap_future(begin(self._processor.shutdown, "loom-spans"))
        done, _ = await asyncio.wait((flushed,), timeout=FLUSH_SECONDS)
        if not done:
            log.warning("the last spans were not exported within %g s", FLUSH_SECONDS)
            self._exporter.shutdown()


class LoggingExporter:
    """A `SpanExporter` that exports with another one, and logs one line when that begins to fail and one when
    it works again. Owner: the SDK's thread."""

    def __init__(self, exporter: OTLPSpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """See `SpanExporter.export`."""
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            if self._lost:
                log.info("spans reach %s again; %d or more were lost", self._endpoint, self._lost)
            self._lost = 0
        else:
            if not self._lost:
                log.warning(
                    "no spans reach %s: they are dropped until it answers. Is an OTLP/HTTP collector there?",
                    self._endpoint,
                )
            self._lost += len(spans)
        return result

    def shutdown(self) -> None:
        """See `SpanExporter.shutdown`. Any thread may call it: an export that is being retried ends."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 0) -> bool:
        """See `SpanExporter.force_flush`: nothing is held here."""
        return True


def phases(report: Report) -> list[tuple[str, float, float]]:
    """(name, start, end) of the phases that the request reached, on the engine's clock."""
    queued, started, first, end = report.queued_at, report.started_at, report.first_token_at, report.ended_at
    found = []
    if queued:
        found.append(("queue", queued, started or end))
    if started:
        found.append(("prefill", started, first or end))
    if first:
        found.append(("decode", first, end))
    return found


def attributes(report: Report) -> dict[str, AttributeValue]:
    """A span's attributes by the semantic conventions for GenAI and HTTP. The times in seconds have vLLM's
    names."""
    request = report.request
    found: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": report.operation,
        "gen_ai.provider.name": "loom",
        "gen_ai.request.model": report.model[:200],
        "gen_ai.request.stream": report.stream,
        "gen_ai.request.id": request[REQUEST_ID],
        "gen_ai.response.model": report.served,
        "gen_ai.response.id": report.id,
        "gen_ai.response.finish_reasons": report.finishes,
        "error.type": report.error,
        "http.request.method": request.method,
        "http.route": request.path,
        "http.response.status_code": report.status,
        "client.address": request.remote,
    }
    if report.params is not None:
        found |= {
            **_sampling(report.params),
            "gen_ai.request.choice.count": report.choices if report.choices > 1 else None,
            "gen_ai.usage.input_tokens": report.prompt_tokens,
            "gen_ai.usage.output_tokens": report.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": report.cached_tokens,
            "gen_ai.latency.e2e": report.ended_at - report.arrived,
        }
        found |= _latencies(report)
    return {name: value for name, value in found.items() if value not in (None, "", [])}


def _sampling(params: SamplingParams) -> Mapping[str, AttributeValue | None]:
    return {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
    }


def _latencies(report: Report) -> Mapping[str, AttributeValue | None]:
    started, first = report.started_at, report.first_token_at
    return {
        "gen_ai.latency.time_in_queue": started - report.queued_at if started else None,
        "gen_ai.latency.time_to_first_token": first - report.arrived if first else None,
        "gen_ai.latency.time_in_model_prefill": first - started if first and started else None,
        "gen_ai.latency.time_in_model_decode": report.ended_at - first if first else None,
    }


def _nanoseconds(report: Report, at: float) -> int:
    """A time on the engine's clock as nanoseconds since 1970; not before the request."""
    return int(1e9 * (report.created + max(at - report.arrived, 0.0)))
