"""Where the server takes connections: a port, or a Unix domain socket."""

from __future__ import annotations

import errno
import os
import resource
import socket
import ssl
from contextlib import ExitStack
from ipaddress import ip_address
from pathlib import Path
from typing import Final, NamedTuple

from aiohttp import web

from app.http.server import Runner
from core.config import ServeConfig
from core.errors import ConfigError
from core.nodes import ANYWHERE

BACKLOG: Final = 4096
"""Listen backlog: a burst of new connections must not be reset."""
ACCEPTS: Final = 16
"""Number of listening handles on the one socket. uvloop accepts one connection for each of them in a turn of
the loop. With one handle, some of 1,024 clients that came at once waited up to 6.4 s to be
accepted, at turns of 5 to 30 ms (`short512` on two H200s)."""


class Address(NamedTuple):
    """`url` as clients on this host write it, with `uds`, the path of the socket, where there is no port;
    `remote`: other hosts may connect."""

    url: str
    uds: str = ""
    remote: bool = False

    def __str__(self) -> str:
        return self.uds or self.url


async def listen(runner: Runner, serve: ServeConfig) -> Address:
    """Take connections from now on. Raises `ConfigError` naming the flag to change."""
    secure = tls(serve)
    scheme = "http" if secure is None else "https"
    try:
        with bind_path(serve.uds) if serve.uds else bind(serve.host, serve.port) as listener:
            for _ in range(ACCEPTS):
                handle = listener.dup()
                with ExitStack() as opened:  # until the site owns it, also where the start is cancelled
                    opened.callback(handle.close)
                    await web.SockSite(runner, handle, backlog=BACKLOG, ssl_context=secure).start()
                    opened.pop_all()
            if serve.uds:
                return Address(f"{scheme}://localhost", serve.uds)
            host, port = listener.getsockname()[:2]
    except OSError as error:
        hint = ""
        if error.errno == errno.EMFILE:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            hint = f" The limit is {limit}: raise it with 'ulimit -Hn' or LimitNOFILE of systemd."
        elif error.errno == errno.EADDRINUSE:  # two may bind a port while neither listens
            hint = f" Another server took port {serve.port} just now: choose one with --port (0: a free one)."
        raise ConfigError(f"cannot listen: {error.strerror or error}.{hint}") from error
    name = "localhost" if host in ANYWHERE else f"[{host}]" if ":" in host else host
    return Address(f"{scheme}://{name}:{port}", remote=not ip_address(host).is_loopback)


def tls(serve: ServeConfig) -> ssl.SSLContext | None:
    """The context for HTTPS; None for HTTP. Raises `ConfigError` for files that cannot be used."""
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
    """Raise `ConfigError` for a file that cannot be read: ssl's own error names no file."""
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ConfigError(f"cannot read {name} {path}: {error.strerror}.") from error


def bind_path(path: str) -> socket.socket:
    """A socket bound to a path, in place of one left by a server that is gone. Raises `ConfigError`."""
    if _answers(path):
        raise ConfigError(f"--uds {path}: another server listens there. Stop it or choose another path.")
    listener = socket.socket(socket.AF_UNIX)
    try:
        if Path(path).is_socket():
            Path(path).unlink()
        elif os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, "it is not a socket. Remove it or choose another path")
        elif not Path(path).absolute().parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, "its directory does not exist. Create that")
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise ConfigError(f"--uds {path}: {error.strerror or error}.") from error
    return listener


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
    except (OSError, TypeError) as error:  # a TypeError for what cannot be a name, as two dots in one
        listener.close()
        code, reason = (error.errno, error.strerror) if isinstance(error, OSError) else (None, None)
        taken = code in (errno.EADDRINUSE, errno.EACCES)
        hint = "Choose another --port (0 takes a free one)." if taken else "Choose another --host."
        raise ConfigError(f"cannot listen on {host} port {port}: {reason or error}. {hint}") from error
    return listener
