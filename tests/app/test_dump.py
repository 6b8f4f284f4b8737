"""`--dump-requests`: every accepted request and its outcome, in files that nobody else reads."""

from __future__ import annotations

import asyncio
import logging
import resource
import shutil
import stat
from pathlib import Path

import msgspec
import pytest

from app.http import dump
from app.http.dump import Accepted, Ended, Files
from app.http.report import REPORTERS
from app.settings import make_parser
from app.text.tokenizer import Tokenizer
from core.config import ServeConfig
from core.errors import ConfigError
from tests.rigs.server import Server, Start
from tests.rigs.step_loop import Bench
from tests.rigs.wait import until

PROMPT = [5, 6, 7, 8]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "dumps" / "here"


@pytest.fixture
async def server(start: Start, folder: Path) -> Server:
    return await start(ServeConfig(dump_requests=str(folder), api_key=("secret",)))


@pytest.fixture
def key() -> dict[str, str]:
    return {"Authorization": "Bearer secret", "X-Api-Key": "secret", "Cookie": "secret"}


def lines(folder: Path) -> list[Accepted | Ended]:
    found = []
    for path in sorted(folder.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        text = path.read_text()
        assert "secret" not in text
        text = text[: text.rfind("\n") + 1]  # the last line may be half written
        found += [msgspec.json.decode(line, type=Accepted | Ended) for line in text.splitlines()]
    return found


async def flushed(server: Server, folder: Path) -> list[Accepted | Ended]:
    """All lines of the dump. Ends the writer, so later requests are not dumped."""
    for reporter in server.app[REPORTERS]:
        await reporter.close()
    return lines(folder)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_and_its_outcome(
    server: Server, folder: Path, key: dict[str, str], stream: bool
) -> None:
    text = b'{"role": "user", "content": "h\xc3\xa4 \\"x\\"\\n"}'
    body = b'{ "messages": [%b],\n "stream": %b, "max_tokens": 3}' % (text, b"true" if stream else b"false")
    headers = {**key, "X-Request-Id": "mine", "Content-Type": "application/json"}
    async with server.http.post("/v1/chat/completions?beta=true", data=body, headers=headers) as response:
        assert response.status == 200
        await response.read()
    first, last = await flushed(server, folder)
    assert isinstance(first, Accepted)
    assert isinstance(last, Ended)
    assert (first.method, first.path, first.body) == ("POST", "/v1/chat/completions", body.decode())
    sent = {name: value for name, value in first.headers.items() if name != "User-Agent"}
    assert sent == {"Content-Type": "application/json", "X-Request-Id": "mine"}
    assert first.key == last.key
    assert (last.status, last.output_tokens, last.finish, last.error) == (200, 3, ["length"], "")
    assert last.prompt_tokens > 0
    assert last.total_ms > 0
    assert not last.failed


async def test_what_is_refused_is_not_there(server: Server, folder: Path, key: dict[str, str]) -> None:
    for body, headers in (({"prompt": PROMPT}, {}), ({"prompt": PROMPT, "temperature": -1}, key)):
        async with server.http.post("/v1/completions", json=body, headers=headers) as response:
            assert response.status in (400, 401)
    assert await flushed(server, folder) == []


async def test_headers_that_are_not_utf8_do_not_end_the_dump(
    server: Server, folder: Path, key: dict[str, str]
) -> None:
    body = b'{"prompt": [5, 6], "max_tokens": 1}'
    head = {"Host": "x", "Content-Type": "application/json", "Content-Length": str(len(body)), **key}
    sent = "".join(f"{name}: {value}\r\n" for name, value in head.items()).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nUser-Agent: a\xffb\r\n" + sent + b"Connection: close\r\n\r\n"
    )
    writer.write(body)
    assert b" 200 " in await reader.readline()
    await reader.read()
    writer.close()
    first, last = await flushed(server, folder)
    assert isinstance(first, Accepted) and isinstance(last, Ended)
    assert (first.headers["User-Agent"], last.status) == ("a\ufffdb", 200)


async def test_a_client_that_left(server: Server, folder: Path, key: dict[str, str]) -> None:
    server.engine.manual = True
    body = {"prompt": PROMPT, "stream": True}
    async with server.http.post("/v1/completions", json=body, headers=key) as response:
        response.close()
    await until(lambda: not server.connections)
    _, last = await flushed(server, folder)
    assert isinstance(last, Ended)
    assert (last.status, last.finish, last.error) == (499, ["abort"], "client_disconnected")


@pytest.mark.parametrize("stream", [False, True])
async def test_what_ran_when_the_engine_failed_is_marked(
    server: Server, folder: Path, key: dict[str, str], tokenizer: Tokenizer, stream: bool
) -> None:
    bench = Bench(tokenizer, fail_at=4, rows=2)
    server.service.ready(msgspec.structs.replace(server.service.loaded, engine=bench.submitter))

    async def ask(tokens: int) -> None:
        body = {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "stream": stream}
        async with server.http.post("/v1/completions", json=body, headers=key) as response:
            await response.read()

    await asyncio.gather(ask(2), ask(50), ask(50))  # one ends before, one runs, one waits
    ends = [line for line in await flushed(server, folder) if isinstance(line, Ended)]
    bench.engine.close()
    assert sorted((end.failed, *end.finish, end.error, end.status) for end in ends) == [
        (False, "length", "", 200),
        *[(True, "error", "engine_failed", 200 if stream else 500)] * 2,
    ]


async def test_what_runs_is_there_without_an_outcome(
    server: Server, folder: Path, key: dict[str, str]
) -> None:
    server.engine.manual = True
    body = {"prompt": PROMPT, "stream": True}
    async with server.http.post("/v1/completions", json=body, headers=key):
        await until(lambda: bool(lines(folder)))
        (line,) = lines(folder)
        assert isinstance(line, Accepted)
        server.engine.runs[0].abort()


async def test_a_large_body_is_written_in_parts_and_whole(
    server: Server, folder: Path, key: dict[str, str]
) -> None:
    text = "ä€😀x" * 30_000  # characters of 1 to 4 bytes, cut anywhere
    body = {"input": text, "truncate_prompt_tokens": 8}
    async with server.http.post("/v1/embeddings", json=body, headers=key) as response:
        assert response.status == 200
    found = await flushed(server, folder)
    assert isinstance(found[0], Accepted)
    assert msgspec.json.decode(found[0].body) == body


def test_files_are_of_a_size_and_few(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump, "FILE_BYTES", 100)
    monkeypatch.setattr(dump, "FILES", 3)
    folder.mkdir(parents=True)
    other = folder / "notes.txt"
    other.touch()
    files = Files(folder)
    for number in range(20):
        files.append(iter([b"%d" % number, b"x" * 60, b"\n"]))
    files.close()
    kept = sorted(folder.glob("*.jsonl"))
    assert len(kept) == 3
    numbers = [int(line.partition("x")[0]) for path in kept for line in path.read_text().splitlines()]
    assert numbers == list(range(14, 20))
    assert other.exists(), "only dumps are deleted"


def test_a_file_that_was_removed_is_followed_by_another(folder: Path) -> None:
    """The file may be removed by an operator who makes room, or by another server, which keeps a few
    files."""
    folder.mkdir(parents=True)
    files = Files(folder)
    files.append(iter([b"1\n"]))
    for path in folder.iterdir():
        path.unlink()
    files.append(iter([b"2\n"]))
    assert [path.read_bytes() for path in folder.iterdir()] == [b"2\n"]
    shutil.rmtree(folder)
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            files.append(iter([b"3\n"]))
    folder.mkdir()
    files.append(iter([b"4\n"]))
    files.append(iter([b"5\n"]))
    files.close()
    (path,) = folder.iterdir()
    assert path.read_bytes() == b"4\n5\n"


async def test_a_full_disk_costs_lines_and_no_request(
    server: Server, folder: Path, key: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    async def ask() -> None:
        body = {"prompt": "x" * 300, "max_tokens": 2}
        async with server.http.post("/v1/completions", json=body, headers=key) as response:
            assert response.status == 200

    await ask()
    await until(lambda: len(lines(folder)) == 2)
    (path,) = folder.iterdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with caplog.at_level(logging.INFO, logger=dump.__name__):
        # As a full disk: the first bytes of the next line fit, the rest does not.
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, limits[1]))
        try:
            await ask()
            await until(lambda: bool(caplog.messages))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        await ask()
        found = await flushed(server, folder)
    assert caplog.messages == ["requests are not dumped: File too large", "requests are dumped again"]
    keys = [line.key for line in found if isinstance(line, Accepted)]
    assert len(keys) == 2, "and nothing of the line that did not fit: all others can be read"


async def test_a_slow_disk_costs_lines_and_no_memory(
    server: Server,
    folder: Path,
    key: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A full buffer stands for a slow disk: the lines that wait are at their limit."""
    monkeypatch.setattr(dump, "WAITING_BYTES", 10)
    async with server.http.post("/v1/completions", json={"prompt": PROMPT}, headers=key) as response:
        assert response.status == 200
    monkeypatch.setattr(dump, "WAITING_BYTES", 10_000)
    with caplog.at_level(logging.WARNING, logger=dump.__name__):
        async with server.http.post("/v1/completions", json={"prompt": PROMPT}, headers=key) as response:
            assert response.status == 200
        assert len(await flushed(server, folder)) == 2
    assert caplog.messages == ["1 requests are not in the dump: the disk was too slow"]


async def test_a_directory_that_cannot_be_written_to_ends_the_start(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--dump-requests .*file.*Name a directory"):
        await start(ServeConfig(dump_requests=str(tmp_path / "file")))


def test_the_limits_are_those_that_help_names() -> None:
    text = " ".join(make_parser().format_help().split())
    assert f"{dump.FILES} files of {dump.FILE_BYTES >> 20} MiB" in text
