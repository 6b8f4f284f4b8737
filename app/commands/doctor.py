"""`python -m app doctor`: checks all that a server with the same flags needs, and prints what to fix."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from app import logs
from app.checkpoint.fetch import NotFetched
from app.compose import describe_devices, find, foresee_memory
from app.listen import bind, tls
from app.process import VERSION, check_writable, invocation
from core.config import Config
from core.env import cache_dir
from core.errors import ConfigError

PACKAGES = ("torch", "transformers", "tokenizers", "aiohttp", "triton", "flashinfer-python")
"""Packages whose versions a bug report should name."""

SPACE = 2**28
"""Bytes on a disk below which the next batch or answer may not fit."""

FILES = 4096
"""Open files below which a server of many streams runs out of them."""


def run(config: Config) -> int:
    """Print a line for each thing looked at: ok, or FIX with what to change. Returns the exit code, 1 where
    anything is to be fixed."""
    logs.set_up("error")
    checks: list[tuple[str, Callable[[Config], Iterable[str]]]] = [
        ("versions", _versions),
        ("devices", describe_devices),
        ("model", _model),
        ("port", _port),
        ("disk", _disk),
        ("open files", _open_files),
    ]
    wrong = False
    for title, check in checks:
        try:
            for line in check(config):
                _say("ok", title, line)
        except NotFetched:
            pull = invocation(f"pull {config.model.model}")
            _say("-", title, f"not fetched yet: a start does it, or '{pull}'")
        except ConfigError as error:
            wrong = True
            _say("FIX", title, str(error))
    return int(wrong)


def _say(verdict: str, title: str, text: str) -> None:
    print(f"{verdict:<3}  {title:<10}  {text}", flush=True)


def _versions(config: Config) -> Iterable[str]:
    named = [f"loom {VERSION}", f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            named.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            named.append(f"no {package}")
    return [", ".join(named), f"{platform.platform()}, {sys.executable}"]


def _model(config: Config) -> Iterable[str]:
    offline = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, offline=True))
    checkpoint = find(offline, lambda text: None)
    architecture, size = checkpoint.config["architectures"][0], checkpoint.size / 2**30
    yield f"{checkpoint.names[0]}, {architecture}, {size:.2f} GiB of weights in {checkpoint.path}"
    yield from foresee_memory(offline)


def _port(config: Config) -> Iterable[str]:
    serve = config.serve
    tls(serve)
    if serve.uds:
        if not (folder := Path(serve.uds).parent).is_dir():
            raise ConfigError(f"--uds {serve.uds}: its directory does not exist. Create that.")
        return [_writable(folder, "--uds")]
    with bind(serve.host, serve.port) as listener:
        listener.listen()
        host, port = listener.getsockname()[:2]
    if not serve.keyed and not serve.host.startswith("127.") and serve.host not in ("localhost", "::1"):
        raise ConfigError(
            f"--host {serve.host} is open to other machines without an API key. Set LOOM_API_KEY or "
            "--api-keys-file, or leave --host out."
        )
    return [f"{host} port {port} is free"]


def _disk(config: Config) -> Iterable[str]:
    data = Path(config.serve.data_dir).expanduser() if config.serve.data_dir else cache_dir() / "data"
    folders = {"LOOM_CACHE": cache_dir(), "--data-dir": data}
    if config.serve.dump_requests:
        folders["--dump-requests"] = Path(config.serve.dump_requests).expanduser()
    return [_writable(folder, setting) for setting, folder in folders.items()]


def _writable(folder: Path, setting: str) -> str:
    """A line about a folder's free space. Raises `ConfigError` where it can be neither written nor made."""
    stat = os.statvfs(check_writable(folder, setting))
    free = stat.f_bavail * stat.f_frsize
    if free < SPACE:
        raise ConfigError(f"{folder} has {free / 2**20:.0f} MiB free: make room, or set {setting}.")
    return f"{folder}: {free / 2**30:.1f} GiB free"


def _open_files(config: Config) -> Iterable[str]:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if 0 <= most < FILES:
        raise ConfigError(
            f"a process may open {most} files, and each stream is one: raise the limit, for example by "
            "'ulimit -Hn 65536' or LimitNOFILE=65536 of systemd."
        )
    return [f"up to {most}"]
