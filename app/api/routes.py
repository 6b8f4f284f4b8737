"""The application: every module's routes, and the objects that handlers share."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from aiohttp import web

from app.api import openapi
from app.api.admin import adapters, admin, control
from app.api.answers import ANSWERS
from app.api.anthropic import routes as anthropic
from app.api.cohere import routes as cohere
from app.api.ollama import routes as ollama
from app.api.openai import batches, chat, completions, files, invoke, models, tokens
from app.api.openai.files import BATCHES
from app.api.page import routes as page
from app.api.pooling import classify, embeddings, rerank, score
from app.api.request.routing import Route, runs
from app.api.responses import routes as responses
from app.api.responses.background import RESPONSES, Responses
from app.api.responses.store import Store as ResponseStore
from app.api.sglang import generate, parsing, sessions
from app.api.vllm import chat_batch, derender, inference, render
from app.batch.batches import Batches
from app.batch.store import Store
from app.http.burst import Burst
from app.http.dump import Dump
from app.http.intake import MAX_HELD, Intake
from app.http.keys import BURST, INTAKE, KEYS, REQUEST_COUNTS, SERVE, SERVICE, TURNS
from app.http.middleware import decorate, edge, expect
from app.http.report import REPORTED, REPORTERS, Reporter, operation_of
from app.http.tenant import Keys
from app.http.turns import Turns
from app.process import check_writable
from app.service import Service
from core.clock import Clock, monotonic
from core.config import ServeConfig
from core.env import cache_dir
from core.errors import ConfigError

TABLE: tuple[Route, ...] = (
    *chat.ROUTES,
    *completions.ROUTES,
    *generate.ROUTES,
    *tokens.ROUTES,
    *models.ROUTES,
    *admin.ROUTES,
    *page.ROUTES,
    *openapi.ROUTES,
    *invoke.ROUTES,
    *control.ROUTES,
    *adapters.ROUTES,
    *render.ROUTES,
    *parsing.ROUTES,
    *files.ROUTES,
    *batches.ROUTES,
    *responses.ROUTES,
    *anthropic.ROUTES,
    *cohere.ROUTES,
    *score.ROUTES,
    *embeddings.ROUTES,
    *rerank.ROUTES,
    *classify.ROUTES,
    *sessions.ROUTES,
    *chat_batch.ROUTES,
    *inference.ROUTES,
    *derender.ROUTES,
    *ollama.ROUTES,
)


def make_app(service: Service, serve: ServeConfig, clock: Clock = monotonic) -> web.Application:
    """The application, for `app.http.server.Runner`. Raises `ConfigError` for a file of keys, and
    where spans or dumps cannot be written."""
    app = web.Application(middlewares=[edge])
    keys = app[KEYS] = Keys(serve.api_key, serve.api_keys_file, clock)
    app[SERVICE] = service
    app[SERVE] = serve
    app[BURST] = Burst()
    app[REQUEST_COUNTS] = Counter()
    app[REPORTERS] = _reporters(serve)
    app[REPORTED] = {(each.method, each.path): operation_of(each.path) for each in TABLE if runs(each.facts)}
    app[INTAKE] = Intake(max(MAX_HELD, 4 * serve.max_body), clock)
    app[TURNS] = Turns()
    data = _data(serve)
    app[BATCHES] = Batches(Store(data), ANSWERS, keys)
    app[RESPONSES] = Responses(ResponseStore(data, serve.response_store))
    app[sessions.SESSIONS] = sessions.TenantSessions(keys, clock)
    app.on_cleanup.append(_close)
    app.on_response_prepare.append(decorate)
    app[openapi.DOCUMENTED] = TABLE
    for route in TABLE:
        app.router.add_route(route.method, route.path, route.handler, expect_handler=expect)
    return app


def _data(serve: ServeConfig) -> Path:
    """Where files, batches and responses are kept. Raises `ConfigError` for a `--data-dir` that cannot be
    written to: otherwise the first request would find out."""
    if not serve.data_dir:
        return cache_dir() / "data"
    data = Path(serve.data_dir).expanduser()
    check_writable(data, "--data-dir")
    return data


def _reporters(serve: ServeConfig) -> list[Reporter]:
    """The reporters that are configured. Raises `ConfigError`."""
    reporters: list[Reporter] = []
    if serve.otlp_traces_endpoint:
        reporters.append(_spans(serve.traces_url))
    if serve.dump_requests:
        reporters.append(Dump(Path(serve.dump_requests).expanduser()))
    return reporters


def _spans(endpoint: str) -> Reporter:
    """A reporter that exports to an OTLP/HTTP collector. Raises `ConfigError`."""
    try:
        from app.http.spans import Spans
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs OpenTelemetry: pip install 'loom-serve[otel]' ({error})"
        ) from error
    return Spans(endpoint)


async def _close(app: web.Application) -> None:
    await app[BATCHES].close()
    await app[RESPONSES].close()
    for reporter in app[REPORTERS]:  # last: those above end what they run
        await reporter.close()
