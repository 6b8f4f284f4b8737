"""`python -m app` as a process: a fork, or one with an interpreter of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from bench.chaos.tiny import ROOT, free_port
from tests.rigs.forked import Forked
from tests.rigs.wait import PATIENCE


def take_ctrl_c() -> None:
    """Restore SIGINT in a new process, before its program: a shell has what it runs in the background ignore
    it, and all that this starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def begin(
    *arguments: str, log: Path, own: bool = False, under: Sequence[str] = ()
) -> subprocess.Popen[bytes] | Forked:
    """Start a command whose standard error goes to the end of a file. `own`: in an interpreter of its own,
    which takes 2 s of CPU time more and also tests `app/__main__.py` and the order of imports. `under` are
    arguments of its Python before the server's: a program that starts it."""
    if not own and not under:
        return Forked("app", *arguments, stderr=log)
    with log.open("ab") as stderr:
        return subprocess.Popen(
            [sys.executable, *under, "-m", "app", *arguments],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=stderr,
            preexec_fn=take_ctrl_c,
        )


class Ended(NamedTuple):
    """Exit code and stderr of a command."""

    returncode: int
    stderr: str


def run_to_end(*arguments: str, own: bool = False) -> Ended:
    """Run a command until it exits, on a free port unless one is given."""
    served = arguments[:1] != ("generate",) and "--port" not in arguments
    port = ("--port", "0") if served else ()
    with tempfile.NamedTemporaryFile("r", prefix="loom-log-") as log:
        process = begin(*port, *arguments, log=Path(log.name), own=own)
        try:
            return Ended(process.wait(PATIENCE), log.read())
        finally:
            process.kill()
            process.wait()


class Process:
    """A running server."""

    def __init__(self, *arguments: str, own: bool = False, under: Sequence[str] = ()) -> None:
        """Start a server, with the arguments of `begin`."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = tempfile.NamedTemporaryFile("r", prefix="loom-log-")  # noqa: SIM115 - until `close`
        log = Path(self._log.name)
        self.process = begin("--port", str(self.port), *arguments, log=log, own=own, under=under)

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
        """The lines logged since the last call."""
        return self._log.read()

    def close(self) -> None:
        """Kill the server, and drop its log."""
        self.process.kill()
        self.process.wait()
        self._log.close()


@contextmanager
def serving(*arguments: str, own: bool = False, under: Sequence[str] = ()) -> Iterator[Process]:
    """Start a server, kill it afterwards."""
    server = Process(*arguments, own=own, under=under)
    try:
        yield server
    finally:
        server.close()


async def read_events(answer: aiohttp.ClientResponse) -> list[Any]:
    """The payloads of all events, "[DONE]" as a string."""
    body = (await answer.read()).decode()
    lines = [line[6:] for line in body.split("\n\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
