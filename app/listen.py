"""Where the server takes connections: a port, or a Unix domain socket."""

from __future__ import annotations

import socket
from typing import NamedTuple

from aiohttp import web

from app.http.server import Runner
from core.config import ServeConfig
from core.errors import ConfigError
from core.nodes import ANYWHERE

BACKLOG = 4096
"""Listen backlog: a burst of new connections must not be reset."""


class Address(NamedTuple):
    """`url` as clients on this host write it, with `uds`, the path of the socket, where there is no port."""

    url: str
    uds: str = ""

    def __str__(self) -> str:
        return self.uds or self.url


async def listen(runner: Runner, serve: ServeConfig) -> Address:
    """Take connections from now on. Raises `ConfigError` naming the flag to change."""
    if serve.uds:
        try:
            await web.UnixSite(runner, serve.uds, backlog=BACKLOG).start()
        except OSError as error:
            raise ConfigError(f"--uds {serve.uds}: {error.strerror or error}.") from error
        return Address("http://localhost", serve.uds)
    listener = bind(serve.host, serve.port)
    await web.SockSite(runner, listener, backlog=BACKLOG).start()
    host, port = listener.getsockname()[:2]
    name = "localhost" if host in ANYWHERE else f"[{host}]" if ":" in host else host
    return Address(f"http://{name}:{port}")


def bind(host: str, port: int) -> socket.socket:
    """A bound socket. Raises `ConfigError` naming the flag to change."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error}. "
            "Choose another with --port (0 takes a free one) or --host."
        ) from error
    return listener
