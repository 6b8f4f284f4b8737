"""Addresses that a server listens on: a port or a Unix domain socket, with TLS or without."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
import uvloop

from app.api.routes import make_app
from app.http.server import Runner
from app.listen import ACCEPTS, Address, bind, listen
from app.service import Service
from core.config import ServeConfig
from core.errors import ConfigError
from tests.rigs.engine import FakeEngine
from tests.rigs.operator import make_loaded
from tests.rigs.server import CARD
from tests.rigs.tokenizer import ByteTokenizer, JoinTemplate


@asynccontextmanager
async def prepared(serve: ServeConfig, ready: bool = False) -> AsyncIterator[Runner]:
    """A server that does not listen yet."""
    service = Service({})
    if ready:
        service.ready(make_loaded(CARD, ByteTokenizer(), JoinTemplate(), FakeEngine()))
    runner = Runner(make_app(service, serve), shutdown_timeout=1.0)
    await runner.setup()
    try:
        yield runner
    finally:
        await runner.cleanup()


@asynccontextmanager
async def served(folder: Path, ready: bool = False, **flags: str) -> AsyncIterator[tuple[Runner, Address]]:
    """A server with these flags."""
    serve = ServeConfig(port=0, data_dir=str(folder / "data"), **flags)
    async with prepared(serve, ready) as runner:
        yield runner, await listen(runner, serve)


async def test_a_server_listens_on_a_path(tmp_path: Path) -> None:
    path = str(tmp_path / "http")
    async with served(tmp_path, uds=path) as (_, address):
        assert str(address) == path
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as session:
            async with session.get("http://loom/health") as answer:
                assert (await answer.json())["status"] == "starting"
            async with session.get("http://loom/nowhere") as unknown:
                assert unknown.status == 404


async def test_a_path_that_cannot_be_listened_on_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "http")
    async with served(tmp_path, uds=path) as (runner, _):
        with pytest.raises(ConfigError, match=r"--uds .*/no/http: its directory does not exist"):
            await listen(runner, ServeConfig(uds=str(tmp_path / "no" / "http")))
        with pytest.raises(ConfigError, match=r"--uds .*/http: another server listens there"):
            await listen(runner, ServeConfig(uds=path))
    assert Path(path).is_socket()  # what a server that is gone has left is no obstacle
    async with served(tmp_path, uds=path) as (_, address):
        assert address.uds == path


@pytest.mark.parametrize(
    ("host", "remote"),
    [("127.0.0.1", False), ("::1", False), ("localhost", False), ("0.0.0.0", True), ("::", True)],
)
async def test_whether_other_hosts_may_connect_is_known(tmp_path: Path, host: str, remote: bool) -> None:
    async with served(tmp_path, host=host) as (_, address):
        assert address.remote == remote
    async with served(tmp_path, host=host, uds=str(tmp_path / "http")) as (_, address):
        assert not address.remote


@pytest.mark.parametrize("host", ["a..b", "ä..b", "a\0b"])
def test_a_host_that_cannot_be_one_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on .*b port 0: .*Choose another --host"):
        bind(host, 0)


@pytest.mark.parametrize("kind", ["file", "folder", "dangling link"])
async def test_a_path_that_is_no_socket_is_left_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "notes"
    if kind == "file":
        path.write_text("kept")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "nowhere")
    before = _kept(path)
    with pytest.raises(ConfigError, match=r"--uds .*/notes: it is not a socket\. Remove it or choose"):
        async with served(tmp_path, uds=str(path)):
            pass
    assert _kept(path) == before


def _kept(path: Path) -> tuple[int, ...]:
    """File status that stays when a path is left alone: not the time of access, which following a link
    changes."""
    stat = path.lstat()
    return stat.st_ino, stat.st_mode, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


@pytest.mark.parametrize("files", [0, ACCEPTS // 2])
async def test_too_few_open_files_are_an_error_of_the_operator(tmp_path: Path, files: int) -> None:
    """Files are missing for the socket, or for its handles."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    serve = ServeConfig(port=0, data_dir=str(tmp_path / "data"))
    async with prepared(serve) as runner:
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + files, hard))
        try:
            with pytest.raises(ConfigError, match=r"Too many open files\. The limit is \d+: raise it with"):
                await listen(runner, serve)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_port_taken_between_bind_and_listen_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port is taken by another server that started at the same time."""
    with bind("127.0.0.1", 0) as own, bind("127.0.0.1", own.getsockname()[1]) as other:
        other.listen()
        monkeypatch.setattr("app.listen.bind", lambda *_: own)
        serve = ServeConfig(host="127.0.0.1", port=own.getsockname()[1], data_dir=str(tmp_path))
        async with prepared(serve) as runner:
            with pytest.raises(ConfigError, match=rf"Another server took port {serve.port} .* --port"):
                await listen(runner, serve)


@pytest.mark.parametrize("path", ["", "http"])
async def test_nobody_is_accepted_after_the_end(tmp_path: Path, path: str) -> None:
    uds = str(tmp_path / path) if path else ""
    async with served(tmp_path, uds=uds) as (_, address):
        port = urlsplit(address.url).port
    client = socket.socket(socket.AF_UNIX if uds else socket.AF_INET)
    with client, pytest.raises(ConnectionRefusedError):
        client.connect(uds or ("127.0.0.1", port))


@pytest.mark.parametrize("path", ["", "http"])
def test_clients_that_come_at_once_are_accepted_within_a_few_turns(tmp_path: Path, path: str) -> None:
    uds = str(tmp_path / path) if path else ""

    async def turns() -> int:
        async with served(tmp_path, uds=uds) as (runner, address), AsyncExitStack() as open_:
            port = urlsplit(address.url).port
            for _ in range(10 * ACCEPTS):
                client = open_.enter_context(socket.socket(socket.AF_UNIX if uds else socket.AF_INET))
                client.connect(uds or ("127.0.0.1", port))
            taken = 0
            assert runner.server is not None
            while len(runner.server.connections) < 10 * ACCEPTS:
                await asyncio.sleep(0)
                taken += 1
            return taken

    assert uvloop.run(turns()) < 3 * ACCEPTS  # one in a turn took 160


@pytest.mark.parametrize(
    ("host", "name"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "localhost"), ("::1", "[::1]")]
)
async def test_the_url_is_one_that_a_client_here_can_use(tmp_path: Path, host: str, name: str) -> None:
    if ":" in host:
        try:
            bind(host, 0).close()
        except ConfigError:
            pytest.skip("this machine has no IPv6")
    async with served(tmp_path, host=host) as (_, address):
        assert address.url.startswith(f"http://{name}:")
        async with aiohttp.ClientSession() as session, session.get(f"{address.url}/health") as answer:
            assert answer.status == 503


# -- TLS ---------------------------------------------------------------------------------------------


def openssl(*words: str) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    subprocess.run(["openssl", *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A certificate for this host, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = str(folder / "cert.pem"), str(folder / "key.pem")
    request = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=loom"
    names = "subjectAltName=IP:127.0.0.1,DNS:localhost"
    openssl(*request.split(), "-addext", names, "-keyout", key, "-out", certificate)
    return certificate, key


async def test_https_answers_and_streams(tmp_path: Path, pair: tuple[str, str]) -> None:
    trusting = ssl.create_default_context(cafile=pair[0])
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 400, "stream": True}
    async with (
        served(tmp_path, ready=True, ssl_certfile=pair[0], ssl_keyfile=pair[1]) as (_, address),
        aiohttp.ClientSession() as session,
    ):
        assert address.url.startswith("https://127.0.0.1:")
        url = f"{address.url}/v1/chat/completions"
        async with session.post(url, json=body, ssl=trusting) as answer:
            events = [line[6:] async for line in answer.content if line.startswith(b"data: ")]
        assert events.pop() == b"[DONE]\n"
        assert json.loads(events[-1])["choices"][0]["finish_reason"] == "length"
        with pytest.raises(aiohttp.ClientError):
            await session.get(url.replace("https", "http"))


def test_every_listening_handle_speaks_tls(tmp_path: Path, pair: tuple[str, str]) -> None:
    """A burst of clients is accepted by all of them."""
    trusting = ssl.create_default_context(cafile=pair[0])

    async def protocols() -> set[object]:
        async with served(tmp_path, ssl_certfile=pair[0], ssl_keyfile=pair[1]) as (_, address):
            where = "127.0.0.1", urlsplit(address.url).port
            clients = (asyncio.open_connection(*where, ssl=trusting) for _ in range(2 * ACCEPTS))
            writers = [writer for _, writer in await asyncio.gather(*clients)]
            for writer in writers:
                writer.close()
            return {writer.get_extra_info("ssl_object").version() for writer in writers}

    assert uvloop.run(protocols()) == {"TLSv1.3"}


async def test_certificate_and_key_may_be_in_one_file(tmp_path: Path, pair: tuple[str, str]) -> None:
    both = tmp_path / "both.pem"
    both.write_text("".join(Path(part).read_text() for part in pair))
    async with served(tmp_path, ssl_certfile=str(both)) as (_, address):
        assert address.url.startswith("https://")


async def test_files_that_are_none_are_named(tmp_path: Path, pair: tuple[str, str]) -> None:
    certificate, key = pair
    encrypted = str(tmp_path / "encrypted.pem")
    openssl("pkey", "-in", key, "-aes256", "-passout", "pass:secret", "-out", encrypted)
    for cert, other, words in (
        ("/nowhere.pem", key, "cannot read --ssl-certfile /nowhere.pem: No such file"),
        (certificate, "/nowhere.pem", "cannot read --ssl-keyfile /nowhere.pem: No such file"),
        (certificate, certificate, "must be a PEM certificate"),
        (certificate, encrypted, "not encrypted"),
    ):
        with pytest.raises(ConfigError, match=words):
            async with served(tmp_path, ssl_certfile=cert, ssl_keyfile=other):
                pass
