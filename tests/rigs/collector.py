"""A collector of OpenTelemetry spans: OTLP over HTTP, protobuf."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from aiohttp import web


class Span(NamedTuple):
    """An exported span. Ids are hexadecimal, times nanoseconds since 1970."""

    name: str
    trace: str
    id: str
    parent: str
    start: int
    end: int
    attributes: Mapping[str, Any]
    events: list[str]
    failed: bool
    service: str


class Collector:
    """The spans that came."""

    def __init__(self) -> None:
        self.url = ""
        self.spans: list[Span] = []

    def roots(self) -> list[Span]:
        """Spans of requests, by time: the others are phases."""
        ids = {span.id for span in self.spans}
        return sorted((span for span in self.spans if span.parent not in ids), key=lambda span: span.start)

    def below(self, parent: Span) -> list[Span]:
        """The phases of a request, in order."""
        return sorted((span for span in self.spans if span.parent == parent.id), key=lambda span: span.start)

    async def take(self, request: web.Request) -> web.Response:
        """The handler of `/v1/traces`."""
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

        sent = trace_service_pb2.ExportTraceServiceRequest.FromString(await request.read())
        for resource in sent.resource_spans:
            service = _values(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                self.spans += [_span(each, service) for each in scope.spans]
        return web.Response(content_type="application/x-protobuf")


def _span(sent: Any, service: str) -> Span:
    return Span(
        sent.name,
        sent.trace_id.hex(),
        sent.span_id.hex(),
        sent.parent_span_id.hex(),
        sent.start_time_unix_nano,
        sent.end_time_unix_nano,
        _values(sent.attributes),
        [event.name for event in sent.events],
        sent.status.code == 2,
        service,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return (
        [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)
    )


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    """A running collector."""
    collector = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    collector.url = f"http://{host}:{port}"
    try:
        yield collector
    finally:
        await runner.cleanup()
