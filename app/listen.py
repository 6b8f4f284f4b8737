"""Where the server takes connections: a port, or a Unix domain socket."""

from __future__ import annotations

import socket
import ssl
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
    secure = tls(serve)
    scheme = "http" if secure is None else "https"
    if serve.uds:
        if _answers(serve.uds):  # asyncio would take its place without a word
            raise ConfigError(
                f"--uds {serve.uds}: another server listens there. Stop it or choose another path."
            )
        try:
            await web.UnixSite(runner, serve.uds, backlog=BACKLOG, ssl_context=secure).start()
        except OSError as error:
            raise ConfigError(f"--uds {serve.uds}: {error.strerror or error}.") from error
        return Address(f"{scheme}://localhost", serve.uds)
    listener = bind(serve.host, serve.port)
    await web.SockSite(runner, listener, backlog=BACKLOG, ssl_context=secure).start()
    host, port = listener.getsockname()[:2]
    name = "localhost" if host in ANYWHERE else f"[{host}]" if ":" in host else host
    return Address(f"{scheme}://{name}:{port}")


def tls(serve: ServeConfig) -> ssl.SSLContext | None:
    """For HTTPS; None for HTTP. Raises `ConfigError` for files that cannot be used."""
    if not serve.ssl_certfile:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    for name, path in (("--ssl-certfile", serve.ssl_certfile), ("--ssl-keyfile", serve.ssl_keyfile)):
        if path:
            _check_readable(name, path)
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(serve.ssl_certfile, serve.ssl_keyfile or None, password="")
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"--ssl-certfile {serve.ssl_certfile} must be a PEM certificate and --ssl-keyfile its key, "
            f"not encrypted: {error}."
        ) from error
    return context


def _check_readable(name: str, path: str) -> None:
    """Raises `ConfigError`: ssl's own error names no file."""
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ConfigError(f"cannot read {name} {path}: {error.strerror}.") from error


def _answers(path: str) -> bool:
    """Whether somebody listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
        return True


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
