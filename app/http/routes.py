"""Method, path, handler: the whole table on one screen."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler

from app.http import admin, models
from app.http.chat import chat
from app.http.completions import completions
from app.http.keys import SERVE, SERVICE
from app.http.middleware import decorate, expect, make_edge
from app.http.native import generate
from app.http.tokens import detokenize, tokenize
from app.service import Service
from core.config import ServeConfig

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
    ("GET", "/health", admin.health),
    ("GET", "/health_generate", admin.health_generate),
    ("GET", "/metrics", admin.metrics),
    ("GET", "/model_info", models.model_info),
    ("GET", "/get_model_info", models.model_info),
    ("GET", "/server_info", admin.server_info),
    ("GET", "/get_server_info", admin.server_info),
    ("GET", "/version", admin.show_version),
    ("GET", "/flush_cache", admin.flush_cache),
    ("POST", "/flush_cache", admin.flush_cache),
    ("POST", "/abort_request", admin.abort_request),
)


def make_app(service: Service, serve: ServeConfig) -> web.Application:
    """The application; `app.http.runner.Runner` serves it."""
    app = web.Application(middlewares=[make_edge(serve.api_key)], client_max_size=serve.max_body)
    app[SERVICE] = service
    app[SERVE] = serve
    app.on_response_prepare.append(decorate)
    for method, path, handler in TABLE:
        app.router.add_route(method, path, handler, expect_handler=expect)
    return app
