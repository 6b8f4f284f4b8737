"""Method, path, handler: the whole table on one screen."""

from __future__ import annotations

from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler

from app.api.admin import admin, control, load
from app.api.answers import ANSWERS
from app.api.anthropic import routes as anthropic
from app.api.cohere import routes as cohere
from app.api.ollama import routes as ollama
from app.api.openai import batches, files, models
from app.api.openai.chat import chat
from app.api.openai.completions import completions
from app.api.openai.files import BATCHES
from app.api.openai.invoke import invocations
from app.api.openai.tokens import detokenize, tokenize
from app.api.openapi import openapi
from app.api.pooling import classify, embeddings, generative, rerank, score
from app.api.responses import Store as ResponseStore
from app.api.responses import routes as responses
from app.api.responses.background import RESPONSES, Responses
from app.api.sglang import parsing, sessions
from app.api.sglang.generate import generate
from app.api.sglang.session_tree import MAX_SESSIONS, Sessions
from app.api.vllm import chat_batch, derender, inference, render
from app.batch import Batches, Store
from app.http.burst import Burst
from app.http.intake import MAX_HELD, Intake
from app.http.keys import BURST, INTAKE, SERVE, SERVICE
from app.http.middleware import decorate, expect, make_edge
from app.http.tenant import Keys
from app.service import Service
from core.clock import monotonic
from core.config import ServeConfig
from core.env import cache_dir

TABLE: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/chat/completions", chat),
    ("POST", "/v1/completions", completions),
    ("POST", "/generate", generate),
    ("POST", "/tokenize", tokenize),
    ("POST", "/v1/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
    ("POST", "/v1/detokenize", detokenize),
    ("GET", "/v1/models", models.models),
    ("GET", "/v1/models/{id:.+}", models.model),
    ("GET", "/", admin.root),
    ("HEAD", "/", admin.root),
    ("GET", "/health", admin.health),
    ("HEAD", "/health", admin.health),
    ("GET", "/ping", admin.health),
    ("GET", "/health_generate", admin.health_generate),
    ("GET", "/metrics", admin.metrics),
    ("GET", "/model_info", models.model_info),
    ("GET", "/get_model_info", models.model_info),
    ("GET", "/tokenizer_info", models.tokenizer_info),
    ("GET", "/server_info", admin.server_info),
    ("GET", "/get_server_info", admin.server_info),
    ("GET", "/version", admin.show_version),
    ("GET", "/flush_cache", admin.flush_cache),
    ("POST", "/flush_cache", admin.flush_cache),
    ("POST", "/reset_prefix_cache", admin.flush_cache),
    ("GET", "/load", load.load),
    ("GET", "/get_load", load.get_load),
    ("GET", "/v1/loads", load.loads),
    ("POST", "/abort_request", admin.abort_request),
    ("POST", "/abort_requests", admin.abort_requests),
    ("GET", "/debug/requests/{id}", admin.timeline),
    ("GET", "/openapi.json", openapi),
    ("POST", "/invocations", invocations),
    *control.TABLE,
    *render.TABLE,
    *parsing.TABLE,
    *files.TABLE,
    *batches.TABLE,
    *responses.TABLE,
    *anthropic.TABLE,
    *cohere.TABLE,
    *score.TABLE,
    *embeddings.TABLE,
    *rerank.TABLE,
    *classify.TABLE,
    *sessions.TABLE,
    *chat_batch.TABLE,
    *inference.TABLE,
    *derender.TABLE,
    *generative.TABLE,
    *ollama.TABLE,
)


def make_app(service: Service, serve: ServeConfig) -> web.Application:
    """The application; `app.http.server.Runner` serves it."""
    keys = Keys(serve.api_key)
    app = web.Application(middlewares=[make_edge(keys)])
    app[SERVICE] = service
    app[SERVE] = serve
    app[BURST] = Burst()
    app[INTAKE] = Intake(max(MAX_HELD, 4 * serve.max_body), monotonic)
    data = Path(serve.data_dir).expanduser() if serve.data_dir else cache_dir() / "data"
    app[BATCHES] = Batches(Store(data), ANSWERS)
    app[RESPONSES] = Responses(ResponseStore(data, serve.response_store))
    share = max(MAX_SESSIONS // len(keys.tenants), 1)
    app[sessions.SESSIONS] = {each: Sessions(monotonic, share) for each in keys.tenants}
    app.on_cleanup.append(_close)
    app.on_response_prepare.append(decorate)
    for method, path, handler in TABLE:
        app.router.add_route(method, path, handler, expect_handler=expect)
    return app


async def _close(app: web.Application) -> None:
    await app[BATCHES].close()
    await app[RESPONSES].close()
