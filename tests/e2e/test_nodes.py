"""Two processes on one host that divide a model, as two hosts would."""

from __future__ import annotations

import asyncio
import os
import signal
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
def two_nodes(path: Path, *more: str) -> Iterator[tuple[Process, Process]]:
    """Node 0 and node 1."""
    port = free_port()
    common = [*flags(dummy_model(path / "model")), "--tp", "2", "--nnodes", "2", *more]
    common += ["--dist-init-addr", f"127.0.0.1:{port}"]
    with serving(*common) as first, serving(*common, "--node-rank", "1") as second:
        yield first, second


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


def nodes_of(torchrun: int) -> list[int]:
    """The processes that torchrun has started, by number."""
    found = {}
    for each in Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split():
        names = dict(
            line.partition("=")[::2] for line in Path(f"/proc/{each}/environ").read_text().split("\0")
        )
        found[int(names["RANK"])] = int(each)
    return [found[rank] for rank in sorted(found)]


async def test_two_nodes_say_what_one_process_says(shared: Process, tmp_path: Path) -> None:
    """Started by torchrun, which ends with 0 if both do."""
    port, expected = free_port(), await texts(shared)
    under = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    under += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    more = ["--tp", "2", "--control-routes"]
    with serving(*flags(dummy_model(tmp_path / "model")), *more, under=under) as server:
        try:
            assert await texts(server) == expected
            zero, one = nodes_of(server.process.pid)
            assert listening(zero) == [LOCALHOST] * 2, "HTTP and gloo"
            assert listening(one) == [LOCALHOST], "gloo"

            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE)) as session:
                for route in ("sleep", "wake_up"):
                    async with session.post(f"{server.url}/{route}") as answer:
                        assert answer.status == 200
                assert await texts(server) == expected

                gone = await begun(session, server)
                assert await running(server, session) == 1
                gone.close()
                async with asyncio.timeout(PATIENCE):
                    while await running(server, session):
                        await asyncio.sleep(0.01)

                # Service managers signal all nodes at once; requests that run are served to their end.
                stream = await begun(session, server, max_tokens=50)
                for each in (one, zero):
                    os.kill(each, signal.SIGTERM)
                events = await read_events(stream)
            assert events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "length"
            assert server.wait() == 0
        finally:
            if server.process.poll() is None:
                for each in nodes_of(server.process.pid):  # which torchrun would leave behind
                    os.kill(each, signal.SIGKILL)


@pytest.mark.parametrize(
    "lost", ["node 1 is killed", "node 0 is killed", pytest.param("node 1 hangs", marks=pytest.mark.slow)]
)
async def test_one_node_less_ends_both(lost: str, tmp_path: Path) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE)) as session:
        with two_nodes(tmp_path, "--watchdog-timeout", "1") as (first, second):
            await first.ready(session)
            assert set(listening(first.process.pid) + listening(second.process.pid)) == {LOCALHOST}
            streams = [await begun(session, first) for _ in range(2)]
            if lost == "node 0 is killed":
                first.signal(signal.SIGKILL)
                assert second.wait() == FAILED
                for stream in streams:
                    stream.close()
                assert "the group of nodes failed" in second.log()
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


async def test_a_node_that_is_lost_while_it_loads_ends_the_other(tmp_path: Path) -> None:
    dies = "import os, sys; from gpu.nodes.join import Nodes; Nodes.least = lambda *_: os._exit(9)"
    dies += "; from app.cli import main; main(sys.argv[3:])"
    common = [*flags(dummy_model(tmp_path / "model")), "--tp", "2", "--nnodes", "2"]
    common += ["--dist-init-addr", f"127.0.0.1:{free_port()}"]
    with (
        serving(*common) as first,
        serving(*common, "--node-rank", "1", under=["-c", dies]) as second,
    ):
        assert second.wait() == 9
        assert first.wait() == FAILED
        log = first.log()
    assert "the group of nodes failed: node 1 at 127.0.0.1 has closed" in log
    assert "Traceback" not in log
