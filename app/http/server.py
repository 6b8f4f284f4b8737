"""aiohttp's server with our limits."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from aiohttp import web
from aiohttp.http import RawRequestMessage

from app.http.connection import LINGER_SECONDS, Connection, ConnectionCount
from app.http.keys import SERVE
from core.config import ServeConfig

IDLE_SECONDS = 75.0
"""Keep-alive timeout; above the 60 s of common proxies."""


class Runner(web.AppRunner):
    """Runs the app. A client that disconnects cancels its handler at once.

    Bodies are never decompressed (a small one could become gigabytes), and there is no access log: the
    middleware logs one line per request.
    """

    def __init__(self, app: web.Application, shutdown_timeout: float = 60.0) -> None:
        super().__init__(
            app,
            handler_cancellation=True,
            auto_decompress=False,
            access_log=None,
            keepalive_timeout=IDLE_SECONDS,
            lingering_time=LINGER_SECONDS,
            shutdown_timeout=shutdown_timeout,
        )

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        return _Server(server, root_path(self.app[SERVE]))


def root_path(serve: ServeConfig) -> str:
    """`--root-path` as a prefix of paths: with a leading and no trailing slash, or empty."""
    path = serve.root_path.strip("/")
    return "/" + quote(path) if path else ""


class _Server(web.Server):
    """aiohttp's server with our connections; `prefix` is removed from paths before routing."""

    def __init__(self, made: web.Server, prefix: str) -> None:
        def request(message: RawRequestMessage, *rest: Any) -> web.BaseRequest:
            url = message.url
            if url.raw_path.startswith(prefix + "/"):
                path = url.raw_path.removeprefix(prefix)
                message = message._replace(url=url.with_path(path, encoded=True, keep_query=True))
            return made.request_factory(message, *rest)

        super().__init__(
            made.request_handler,
            request_factory=request if prefix else made.request_factory,
            handler_cancellation=made.handler_cancellation,
            **made._kwargs,
        )
        self._open = ConnectionCount()

    def __call__(self) -> web.RequestHandler:
        return Connection(self, self._open, loop=self._loop, **self._kwargs)
