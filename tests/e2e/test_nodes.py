"""Two processes on one host that divide a model, as two hosts would."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from app.process import FAILED, HUNG
from bench.chaos.tiny import dummy_model, flags, free_port
from tests.rigs.metrics import samples
from tests.rigs.process import Process, read_events, serving
from tests.rigs.sockets import LOCALHOST, listening
from tests.rigs.texts import texts
from tests.rigs.wait import PATIENCE


@contextmanager
def two_nodes(path: Path, *more: str) -> Iterator[tuple[Process, Process, int]]:
    """Node 0, node 1 and the port where they find each other."""
    port = free_port()
    common = [*flags(dummy_model(path / "model")), "--tp", "2", "--nnodes", "2", *more]
    common += ["--dist-init-addr", f"127.0.0.1:{port}"]
    with serving(*common) as first, serving(*common, "--node-rank", "1") as second:
        yield first, second, port


async def running(server: Process, session: aiohttp.ClientSession) -> int:
    async with session.get(f"{server.url}/metrics") as answer:
        found = samples(await answer.text())
    return int(sum(value for (name, _), value in found.items() if name == "loom_requests_running"))


async def begun(
    session: aiohttp.ClientSession, server: Process, max_tokens: int = 1500
) -> aiohttp.ClientResponse:
    """A stream that has had its first event."""
    body = {"prompt": "x" * 20, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    stream = await session.post(f"{server.url}/v1/completions", json=body)
    await stream.content.readuntil(b"\n\n")
    return stream


async def test_two_nodes_say_what_one_process_says(shared: Process, tmp_path: Path) -> None:
    expected = await texts(shared)
    timeout = aiohttp.ClientTimeout(PATIENCE)
    with two_nodes(tmp_path) as (first, second, port):
        async with aiohttp.ClientSession(timeout=timeout) as session:
            assert await texts(first) == expected
            assert set(listening(first.process.pid) + listening(second.process.pid)) == {LOCALHOST}
            assert len(listening(second.process.pid)) == 1, "no HTTP, only gloo"

            # What is no node changes nothing.
            for junk in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(1000)):
                with socket.create_connection(("127.0.0.1", port)) as stranger:
                    stranger.sendall(junk)
            gone = await begun(session, first)
            assert await running(first, session) == 1
            gone.close()
            async with asyncio.timeout(PATIENCE):
                while await running(first, session):
                    await asyncio.sleep(0.01)

            # Service managers signal all nodes at once; those that run are served to their end.
            stream = await begun(session, first, max_tokens=50)
            second.signal(signal.SIGTERM)
            first.signal(signal.SIGTERM)
            events = await read_events(stream)
        assert events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "length"
        assert (first.wait(), second.wait()) == (0, 0)


@pytest.mark.parametrize("lost", ["node 1 is killed", "node 1 hangs", "node 0 is killed"])
async def test_one_node_less_ends_both(lost: str, tmp_path: Path) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE)) as session:
        with two_nodes(tmp_path, "--watchdog-timeout", "1") as (first, second, _):
            await first.ready(session)
            streams = [await begun(session, first) for _ in range(2)]
            if lost == "node 0 is killed":
                first.signal(signal.SIGKILL)
                assert second.wait() == FAILED
                assert "node 0 has closed the connection" in second.log()
                for stream in streams:
                    stream.close()
                return
            second.signal(signal.SIGKILL if lost == "node 1 is killed" else signal.SIGSTOP)
            ends: list[Any] = await asyncio.gather(*(read_events(stream) for stream in streams))
            for events in ends:
                assert events[-1] == "[DONE]"
                assert events[-2]["error"]["type"] == "server_error", events[-2]
            assert first.wait() == (FAILED if lost == "node 1 is killed" else HUNG)
            assert "the engine failed" in first.log()
            second.signal(signal.SIGCONT)
            assert second.wait() != 0


async def test_torchrun_starts_the_nodes(shared: Process, tmp_path: Path) -> None:
    """They find each other in its store, and it ends them."""
    under = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    under += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    with serving(*flags(dummy_model(tmp_path / "model")), "--tp", "2", under=under) as started:
        try:
            assert await texts(started) == await texts(shared)
        finally:
            started.signal(signal.SIGTERM)  # or its processes would be left behind
            started.wait()
        assert "node 0 has ended" in started.log()
