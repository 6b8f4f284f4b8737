"""Start, requests, drain and exit of a real server process."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import socket
from pathlib import Path

import aiohttp
import pytest

from bench.chaos.tiny import dummy_model, flags
from tests.rigs.process import Process, read_events, run_to_end, serving
from tests.rigs.wait import PATIENCE

LONG = {"prompt": "x" * 50, "max_tokens": 1500, "ignore_eos": True, "stream": True}
BACKENDS = ("torch", "prefill=torch,decode=cpu")
"""Attention backends without a C compiler, and with one."""

WHOLE = {**LONG, "max_tokens": 600}
"""A request that runs to its end, which takes 2 ms a token. It must still run when the server drains."""


async def statistic(session: aiohttp.ClientSession, server: Process, name: str) -> float:
    async with session.get(f"{server.url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return float(next(line.rsplit(" ", 1)[1] for line in lines if line.startswith(name)))


async def wait_for(session: aiohttp.ClientSession, server: Process, name: str, value: float) -> None:
    async with asyncio.timeout(PATIENCE):
        while await statistic(session, server, name) != value:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "nowhere/at/all"], "nowhere/at/all"),
        (["--model", "nowhere.gguf"], "nowhere.gguf"),
        (["--port", "70000"], "--port"),
        (["--page-size", "3"], "power of two"),
    ],
)
def test_wrong_arguments_are_one_line_of_error_and_exit_status_2(arguments: list[str], words: str) -> None:
    ended = run_to_end(*arguments, "--offline", own=True)
    assert ended.returncode == 2
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("loom: error:")
    assert words in last
    assert "Traceback" not in ended.stderr


def test_the_error_of_an_occupied_port_names_it(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ended = run_to_end(*flags(model), "--port", port)
    assert ended.returncode == 2
    assert port in ended.stderr
    assert "--port" in ended.stderr


def test_the_error_of_an_unsupported_checkpoint_has_the_reason(tmp_path: Path) -> None:
    dummy = dummy_model(tmp_path)
    config = json.loads((dummy / "config.json").read_text())
    (dummy / "config.json").write_text(json.dumps({**config, "architectures": ["MysteryForCausalLM"]}))
    unknown = run_to_end(*flags(dummy))
    assert (unknown.returncode, "MysteryForCausalLM" in unknown.stderr) == (2, True)
    (dummy / "config.json").write_text(json.dumps({**config, "intermediate_size": 10**9}))
    huge = run_to_end(*flags(dummy))
    assert huge.returncode == 2
    assert "memory" in huge.stderr.splitlines()[-1]


async def test_requests_a_disconnecting_client_and_a_drain(
    model: Path, session: aiohttp.ClientSession
) -> None:
    with serving(*flags(model), "--drain-timeout", "60", own=True) as server:
        before = await server.ready(session)
        assert all(body["status"] == "starting" for body in before)
        async with asyncio.timeout(PATIENCE):
            text = ""
            while "Ctrl-C" not in text:
                text += server.log()
        assert server.url in text and "  try it   curl " in text
        async with session.get(f"{server.url}/server_info") as answer:
            assert (await answer.json())["model_card"]["attention_backend"] in BACKENDS
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "ignore_eos": True}
        async with session.post(f"{server.url}/v1/chat/completions", json=body) as answer:
            chat = await answer.json()
        assert chat["usage"]["completion_tokens"] == 8
        assert "POST /v1" not in server.log()

        # The request of a client that disconnects during its stream is aborted.
        gone = await session.post(f"{server.url}/v1/completions", json=LONG)
        await gone.content.readany()
        await wait_for(session, server, "loom_requests_running", 1)
        gone.close()
        await wait_for(session, server, "loom_requests_running", 0)

        # After SIGTERM running requests finish, and new ones are rejected.
        running = await session.post(f"{server.url}/v1/completions", json=WHOLE)
        await running.content.readany()
        server.signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE):
            while True:
                async with session.get(f"{server.url}/health") as health:
                    if health.status == 503:
                        break
        async with session.post(f"{server.url}/v1/completions", json=LONG) as rejected:
            assert rejected.status == 503
            assert "retry-after" in rejected.headers
        events = await read_events(running)
        assert events[-1] == "[DONE]"
        assert events[-2]["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0


async def test_a_drain_waits_for_answers_that_clients_still_read(
    model: Path, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    size = 32 * 2**20  # more than the kernel's buffers
    with serving(*flags(model), "--drain-timeout", "60", "--data-dir", str(tmp_path)) as server:
        await server.ready(session)
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", io.BytesIO(b"x" * size), filename="a.jsonl")
        async with session.post(f"{server.url}/v1/files", data=form) as answer:
            id = (await answer.json())["id"]
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        writer.write(f"GET /v1/files/{id}/content HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        server.signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE):
            while "draining" not in server.log():
                await asyncio.sleep(0.01)
        await asyncio.sleep(1.5)  # without an answer under way it exits after 0.5 s
        assert server.process.poll() is None
        assert len(await reader.read()) == size
        writer.close()
        assert server.wait() == 0


async def test_the_drain_deadline_ends_streams_with_an_error_event(
    model: Path, session: aiohttp.ClientSession
) -> None:
    with serving(*flags(model), "--drain-timeout", "0", "--access-log") as server:
        await server.ready(session)
        running = await session.post(f"{server.url}/v1/completions", json=LONG)
        await running.content.readany()
        server.signal(signal.SIGTERM)
        events = await read_events(running)
        assert "shutting down" in events[-2]["error"]["message"]
        assert events[-1] == "[DONE]"
        assert server.wait() == 0
        assert "POST /v1/completions 200" in server.log()


async def test_a_hangup_reads_the_keys_again(
    model: Path, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[keys.alice]\nkey = "a"\n')
    with serving(*flags(model), "--api-keys-file", str(file)) as server:
        await server.ready(session)

        async def status(key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            async with session.get(f"{server.url}/v1/models", headers=headers) as answer:
                return answer.status

        assert (await status("a"), await status("b")) == (200, 401)
        file.write_text('[keys.bob]\nkey = "b"\n')
        server.signal(signal.SIGHUP)
        async with asyncio.timeout(PATIENCE):
            while await status("b") != 200:
                await asyncio.sleep(0.01)
        assert await status("a") == 401
        written = ""
        async with asyncio.timeout(PATIENCE):  # lines are written by a thread
            while "API keys: removed alice; added bob" not in written:
                await asyncio.sleep(0.01)
                written += server.log()
