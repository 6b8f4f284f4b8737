"""aiohttp's server with our limits, and with our error body where no middleware runs."""

from __future__ import annotations

import logging
from typing import Any
from urllib.parse import quote

from aiohttp import web
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import LineTooLong

from app.errors import HttpError, fault
from app.http.keys import SERVE
from app.http.reply import error_response
from core.config import ServeConfig

log = logging.getLogger(__name__)

IDLE_SECONDS = 75.0
"""How long a connection may stand open without a request; above the 60 s of common proxies."""
LINGER_SECONDS = 2.0
"""How long the rest of a refused body is read and thrown away, so that the client sees the answer."""


class Connection(web.RequestHandler):
    """One client connection. Owner: event loop."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what is not HTTP, or an error outside every handler, and close."""
        if request.writer.output_size > 0:
            raise ConnectionError("the response has begun; it cannot become an error")
        if status >= 500:
            log.error("error outside a handler", exc_info=exc)
            response = error_response(fault(exc or RuntimeError()))
        else:
            status = 431 if isinstance(exc, LineTooLong) else status
            # The parser's message quotes the client's bytes over several lines: keep the first.
            reason = (message or "Bad request").split("\n", 1)[0]
            response = error_response(fault(HttpError(status, f"Malformed HTTP: {reason}", "bad_http")))
        response.force_close()
        return response


class Runner(web.AppRunner):
    """Runs the app so that a client that goes away cancels its handler at once.

    Bodies are never decompressed (a small one could become gigabytes), and there is no access log:
    the middleware writes one line per request.
    """

    __slots__ = ()

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
    """`--root-path` as it stands before a request's path: one slash before it, none behind, or empty."""
    path = serve.root_path.strip("/")
    return "/" + quote(path) if path else ""


class _Server(web.Server):
    """The same server, making our connections; `prefix` is taken off before anything looks at a path."""

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

    def __call__(self) -> web.RequestHandler:
        return Connection(self, loop=self._loop, **self._kwargs)
