"""`python -m app` as a process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp

from bench.chaos.tiny import ROOT, free_port
from tests.rigs.wait import PATIENCE


def take_ctrl_c() -> None:
    """In a new process, before its program: a shell has what it runs in the background ignore SIGINT, and all
    that this starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_to_end(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command until it exits, on a free port unless one is given."""
    served = arguments[:1] != ("generate",) and "--port" not in arguments
    port = ("--port", "0") if served else ()
    return subprocess.run(
        [sys.executable, "-m", "app", *port, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


class Process:
    """A running server."""

    def __init__(self, *arguments: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "app", "--port", str(self.port), *arguments],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )

    async def ready(self, session: aiohttp.ClientSession) -> list[dict[str, object]]:
        """Wait until `/health` is ok; returns the bodies of its earlier answers."""
        seen: list[dict[str, object]] = []
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log()
            try:
                async with session.get(f"{self.url}/health") as answer:
                    body = await answer.json()
                    if answer.status == 200:
                        return seen
                    seen.append(body)
            except aiohttp.ClientConnectionError:
                pass  # not listening yet
            await asyncio.sleep(0.02)  # polling without a pause would take CPU time from the server
        raise AssertionError("the server did not become ready")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """Wait for the process. Returns the exit code."""
        return self.process.wait(PATIENCE)

    def log(self) -> str:
        """The log, after the process has exited."""
        assert self.process.stderr is not None
        return self.process.stderr.read()


@contextmanager
def serving(*arguments: str) -> Iterator[Process]:
    """Start a server, kill it afterwards."""
    server = Process(*arguments)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()
        if server.process.stderr is not None:
            server.process.stderr.close()


async def read_events(answer: aiohttp.ClientResponse) -> list[Any]:
    """The payloads of all events, "[DONE]" as a string."""
    body = (await answer.read()).decode()
    lines = [line[6:] for line in body.split("\n\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
