"""Controls the server under test, from the process that attacks it."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.chaos.clients import ask
from bench.chaos.row import Setting
from bench.chaos.tiny import ROOT, dummy_model, flags, free_port

TIMEOUT = 120.0
"""Seconds after which the server counts as hung."""
STOP_TIMEOUT = 10.0
"""Seconds between SIGTERM and SIGKILL."""
STALLED_POLLS = 20
"""Polls in a row without progress after which the server counts as stuck."""
POLL_INTERVAL = 0.1
"""Seconds between two polls."""


class Polls:
    """Polls until nothing changes any more."""

    def __init__(self) -> None:
        self._before: object = None
        self._stalled = 0

    async def again(self, progress: object) -> bool:
        """Wait for the next poll; False when `progress` has been the same for `STALLED_POLLS` polls."""
        self._stalled = self._stalled + 1 if progress == self._before else 0
        if self._stalled == STALLED_POLLS:
            return False
        self._before = progress
        await asyncio.sleep(POLL_INTERVAL)
        return True


class Server:
    """A `bench.chaos.child`, in which servers start and end one after another."""

    def __init__(self, model: str) -> None:
        self.port = 0
        self.setting: Setting | None = None
        """Setting of the running server."""
        self.starts = 0
        self._model = model
        self._temporary = tempfile.TemporaryDirectory(prefix="loom-chaos-")
        self._directory = Path(self._temporary.name)
        self._process: asyncio.subprocess.Process | None = None
        self._pid = 0
        """Process id of the server."""
        self._reader: asyncio.Task[None] | None = None
        self._ids = itertools.count()
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ended: asyncio.Future[int] | None = None

    # -- life --------------------------------------------------------------------------------------

    async def start(self, setting: Setting) -> None:
        """Serve with these settings; returns when ready."""
        if self._process is None:
            await self._spawn()
        self.starts += 1
        self.setting, self.port = setting, free_port()
        self._ended = asyncio.get_running_loop().create_future()
        device = self._model if self._model and setting.device == "tiny" else setting.device
        started = await self.call("start", device=device, flags=self._flags(setting))
        self._pid = started["pid"]
        async with asyncio.timeout(TIMEOUT):
            while await self.health() != 200:
                if self._ended.done():
                    raise RuntimeError(f"the server did not start:\n{self.log()[-3000:]}")
                await asyncio.sleep(0.02)

    def _flags(self, setting: Setting) -> list[str]:
        arguments = [
            "--port",
            str(self.port),
            "--log-level",
            "warning",
            "--data-dir",
            str(self._directory / "data"),
        ]
        if self._model and setting.device != "counting":
            arguments += ["--model", self._model] if self._model != "default" else []
        else:
            arguments += flags(dummy_model(self._directory / "model"))
        return [*arguments, *setting.flags]

    async def _spawn(self) -> None:
        with (self._directory / "log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "bench.chaos.child"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self._reader = asyncio.create_task(self._read(self._process))

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            message = json.loads(line)
            if "ended" in message:
                self._end(message["ended"])
            elif (pending := self._pending.pop(message.pop("id"), None)) is not None and not pending.done():
                pending.set_result(message)
        self._end(await process.wait())

    def _end(self, code: int) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(code)
        for pending in self._pending.values():
            if not pending.done():
                pending.set_result({"error": "the server has ended"})
        self._pending.clear()

    @property
    def alive(self) -> bool:
        """Whether a server was started and has not ended."""
        return self._ended is not None and not self._ended.done()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server's process."""
        os.kill(self._pid, number)

    async def ended(self) -> int:
        """The exit code, once it has ended."""
        assert self._ended is not None
        async with asyncio.timeout(TIMEOUT):
            return await asyncio.shield(self._ended)

    async def stop(self) -> None:
        """Stop the server if one runs; the process stays."""
        if self.alive:
            for _ in range(2):  # the second signal does not wait for running requests
                self.signal(signal.SIGTERM)
                await asyncio.sleep(0.05)
            assert self._ended is not None
            await asyncio.wait([self._ended], timeout=STOP_TIMEOUT)
            if self.alive:
                await self.kill()

    async def kill(self) -> None:
        """Kill the server's process; the next start has another."""
        self.signal(signal.SIGKILL)
        await self.ended()

    async def close(self) -> None:
        """End the processes: the server's, which has no more to read, and the one that it is a fork of."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            await self._process.wait()
        if self._reader is not None:
            await self._reader
        self._temporary.cleanup()

    def log(self) -> str:
        """The server's log."""
        return (self._directory / "log").read_text(errors="replace")

    # -- calls -------------------------------------------------------------------------------------

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Call `method` of `bench.chaos.child`. Raises `RuntimeError` when no server runs."""
        id = next(self._ids)
        self._pending[id] = asyncio.get_running_loop().create_future()
        self._send({"method": method, "id": id, **parameters})
        async with asyncio.timeout(TIMEOUT):
            answer = await self._pending[id]
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    async def health(self) -> int:
        """Status of `/health`; 0 without an answer."""
        return (await ask(self.port, "GET", "/health")).status

    async def wait_idle(self) -> bool:
        """Wait until nothing runs or waits; False when requests are left but there is no progress."""
        polls = Polls()
        while True:
            now = await self.call("progress")
            if not now["running"] and not now["waiting"]:
                return True
            if not await polls.again((now["steps"], now["output"], now["finished"])):
                return False
