"""The server under attack, seen from the process that attacks it."""

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

PATIENCE = 120.0
"""Seconds. A bound for what hangs, never a promise."""
ENDING = 10.0
"""Seconds that a server gets which nobody needs any more."""
STILL = 20
"""Looks in a row, `LOOK` seconds apart, at a server in which nothing moves, before it is called stuck."""
LOOK = 0.1


class Server:
    """One `bench.chaos.child`. Servers start and end in it, several after each other."""

    def __init__(self, model: str) -> None:
        self.port = 0
        self.setting: Setting | None = None
        """Of the server that runs, or should."""
        self.starts = 0
        self._model = model
        self._folder = tempfile.TemporaryDirectory(prefix="loom-chaos-")
        self._place = Path(self._folder.name)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._ids = itertools.count()
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ended: asyncio.Future[int] | None = None

    # -- life --------------------------------------------------------------------------------------

    async def start(self, setting: Setting) -> None:
        """Serve with these settings, in the process that there is or in a new one; returns when ready."""
        if self._process is None or self._process.returncode is not None:
            await self._spawn()
        self.starts += 1
        self.setting, self.port = setting, free_port()
        self._ended = asyncio.get_running_loop().create_future()
        device = self._model if self._model and setting.device == "tiny" else setting.device
        self._send({"ask": "start", "device": device, "flags": self._flags(setting)})
        async with asyncio.timeout(PATIENCE):
            while await self.health() != 200:
                if self._ended.done():
                    raise RuntimeError(f"the server did not start:\n{self.log()[-3000:]}")
                await asyncio.sleep(0.02)

    def _flags(self, setting: Setting) -> list[str]:
        given = ["--port", str(self.port), "--log-level", "warning", "--data-dir", str(self._place / "data")]
        if self._model and setting.device != "counting":
            given += ["--model", self._model] if self._model != "default" else []
        else:
            given += flags(dummy_model(self._place / "model"))
        return [*given, *setting.flags]

    async def _spawn(self) -> None:
        with (self._place / "log").open("ab") as log:
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
            elif (asked := self._asked.pop(message.pop("id"), None)) is not None and not asked.done():
                asked.set_result(message)
        self._end(await process.wait())

    def _end(self, code: int) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(code)
        for asked in self._asked.values():
            if not asked.done():
                asked.set_result({"error": "the server has ended"})
        self._asked.clear()

    @property
    def alive(self) -> bool:
        """A server was started and has not ended."""
        return self._ended is not None and not self._ended.done()

    def signal(self, number: signal.Signals) -> None:
        """To the process, as an operator would."""
        assert self._process is not None
        self._process.send_signal(number)

    async def ended(self) -> int:
        """The exit code, once it has ended."""
        assert self._ended is not None
        async with asyncio.timeout(PATIENCE):
            return await asyncio.shield(self._ended)

    async def stop(self) -> None:
        """End the server if one runs; the process stays."""
        if self.alive:
            for _ in range(2):  # the second signal does not wait for what runs
                self.signal(signal.SIGTERM)
                await asyncio.sleep(0.05)
            assert self._ended is not None
            await asyncio.wait([self._ended], timeout=ENDING)
            if self.alive:
                await self.kill()

    async def kill(self) -> None:
        """End the process; the next start makes another."""
        self.signal(signal.SIGKILL)
        await self.ended()

    async def close(self) -> None:
        """End the process."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        if self._reader is not None:
            await self._reader
        self._folder.cleanup()

    def log(self) -> str:
        """What it wrote."""
        return (self._place / "log").read_text(errors="replace")

    # -- questions ---------------------------------------------------------------------------------

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def tell(self, question: str, **more: object) -> dict[str, Any]:
        """What `bench.chaos.child` answers. Raises `RuntimeError` when no server runs."""
        id = next(self._ids)
        self._asked[id] = asyncio.get_running_loop().create_future()
        self._send({"ask": question, "id": id, **more})
        async with asyncio.timeout(PATIENCE):
            found = await self._asked[id]
        if "error" in found:
            raise RuntimeError(found["error"])
        return found

    async def health(self) -> int:
        """Status of `/health`; 0 when nobody answers."""
        return (await ask(self.port, "GET", "/health")).status

    async def settled(self) -> bool:
        """Wait until nothing runs or waits; False when requests are left and nothing moves any more."""
        before, still = None, 0
        while True:
            now = await self.tell("progress")
            if not now["running"] and not now["waiting"]:
                return True
            moved = now["steps"], now["output"], now["finished"]
            still = still + 1 if moved == before else 0
            if still == STILL:
                return False
            before = moved
            await asyncio.sleep(LOOK)
