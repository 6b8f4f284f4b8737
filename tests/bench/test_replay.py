"""`python -m bench.replay`: what a server dumped reaches another as it was, and the outcomes are compared."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from app.http.report import REPORTERS
from bench.load.client import Target
from bench.replay import load, main, replay
from core.config import ServeConfig
from tests.rigs.server import Server, Start, starting

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
USAGE = {"stream_options": {"include_usage": True}}
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {**CHAT, **USAGE, "stream": True}),
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 4, "stream": True, **USAGE}),
    ("/v1/messages", {**CHAT, "stream": True}),
    ("/v1/responses", {"input": "hä", "max_output_tokens": 4, "stream": True}),
    ("/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 4}, "stream": True}),
    ("/api/chat", {"messages": CHAT["messages"], "options": {"num_predict": 4}}),
]
"""One route for each way in which answers are read."""
LINE = {"event": "request", "key": "a", "at": 1, "method": "POST", "path": "/"}


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    async with starting(tmp_path) as start:
        yield start


async def recorded(server: Server, asked: list[tuple[str, dict[str, Any]]]) -> None:
    """Ask all of it, and end the dump."""
    for path, body in asked:
        async with server.http.post(path, json=body, headers={"X-Request-Id": "mine"}) as response:
            await response.read()
    for reporter in server.app[REPORTERS]:
        await reporter.close()


def rows(text: str) -> dict[str, list[str]]:
    """Both columns of the table by the name of the row."""
    split = [line.rsplit(maxsplit=2) for line in text.splitlines()[1:]]
    return {name.strip(): values for name, *values in split}


async def test_every_route_is_replayed_and_compared(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "dump"
    first, second = await start(ServeConfig(dump_requests=str(folder))), await start()
    await recorded(first, ASKED)
    code = await asyncio.to_thread(main, [str(folder), "--base-url", second.url, "--speed", "inf"])
    text = capsys.readouterr().out
    assert code == 0, text
    table = rows(text)
    count = len(ASKED)
    assert table["requests"] == [str(count), str(count)]
    assert table["errors"] == table["without an outcome"] == ["0", "0"]
    assert table["output tokens"] == [str(4 * count), str(4 * count)]
    assert table["prompt tokens"][0] == table["prompt tokens"][1] != "0"
    for name in ("TTFT p50 (ms)", "gap p99 (ms)", "total p50 (ms)"):
        assert all(float(cell) >= 0 for cell in table[name])
    sent, again = (sorted(str(run.job.prompt) for run in each.engine.runs) for each in (first, second))
    assert sent == again


async def test_what_ran_at_a_crash_is_replayed_alone(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "dump"
    first, second = await start(ServeConfig(dump_requests=str(folder))), await start()
    prompts = [[5, 6], [7, 8], [9, 10]]
    await recorded(first, [("/v1/completions", {"prompt": prompts[0], "max_tokens": 2})])
    (tmp_path / "later").mkdir()
    failing = await start(ServeConfig(dump_requests=str(tmp_path / "later")))
    failing.engine.fail_at = 0
    await recorded(failing, [("/v1/completions", {"prompt": each, "stream": True}) for each in prompts[1:]])
    (path,) = (tmp_path / "later").iterdir()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])  # it died before the last outcome was written
    args = [str(folder), str(path), "--base-url", second.url, "--speed", "inf", "--unfinished"]
    assert await asyncio.to_thread(main, args) == 0
    table = rows(capsys.readouterr().out)
    assert (table["requests"], table["errors"]) == (["2", "2"], ["1", "0"])
    assert table["without an outcome"] == ["1", "0"]
    assert table["output tokens"][0] == "0" != table["output tokens"][1], "there is nothing to compare with"
    assert sorted(run.prompt.tolist() for run in second.engine.runs) == prompts[1:]


async def test_errors_are_counted_and_shown(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "dump"
    first = await start(ServeConfig(dump_requests=str(folder)))
    second = await start(ServeConfig(api_key=("key",)))
    await recorded(first, ASKED[:2])
    args = [str(folder), "--base-url", second.url, "--speed", "inf"]
    assert await asyncio.to_thread(main, args) == 1
    text = capsys.readouterr().out
    assert rows(text)["errors"] == ["0", "2"]
    assert "2 x http 401: Incorrect API key" in text
    assert await asyncio.to_thread(main, [*args, "--api-key", "key"]) == 0
    second.engine.fail_at = 1
    assert await asyncio.to_thread(main, [*args, "--api-key", "key"]) == 1
    assert "1 x stream error: The device was lost." in capsys.readouterr().out


async def test_headers_are_replayed_as_the_server_took_them(start: Start, tmp_path: Path) -> None:
    server = await start(ServeConfig(dump_requests=str(tmp_path / "dump")))
    for value in ("a\tb", "\udcff", "\u00a0", "\u200b"):
        body = {"prompt": [5, 6], "max_tokens": 1}
        async with server.http.post("/v1/completions", json=body, headers={"X-Session-Id": value}) as answer:
            assert answer.status == 200
    for reporter in server.app[REPORTERS]:
        await reporter.close()
    assert len(load([tmp_path / "dump"])) == 4


async def test_requests_keep_their_distance(start: Start, tmp_path: Path) -> None:
    server = await start(ServeConfig(dump_requests=str(tmp_path / "dump")))
    await recorded(server, [ASKED[1]] * 3)
    loaded = load([tmp_path / "dump"])
    for each, at in zip(loaded, (100.0, 100.02, 100.06), strict=True):
        each.request.at = at
    for speed in (1.0, 4.0):
        sent = [pair.replayed.sent for pair in await replay(loaded, Target.of(server.url), speed)]
        assert [after - sent[0] >= at / speed for after, at in zip(sent, (0, 0.02, 0.06), strict=True)] == [
            True
        ] * 3


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "is not of a dump"),
        ({**LINE, "path": "/ HTTP/1.1\r\n"}, "cannot be sent"),
        ({**LINE, "headers": {"A": "b\r\nHost: other"}}, "cannot be sent"),
        ({**LINE, "method": "DELETE"}, "cannot be sent"),
    ],
)
def test_a_file_that_is_none_is_named(
    line: Any, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_bytes((line.encode() if isinstance(line, str) else msgspec.json.encode(line)) + b"\n")
    with pytest.raises(SystemExit) as ended:
        main([str(path)])
    assert ended.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "notes.jsonl, line 1" in said
    assert reason in said
