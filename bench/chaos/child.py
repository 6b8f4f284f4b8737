"""The server under test: `app.server.Server` in a process that also reports its accounting.

    python -m bench.chaos.child

Reads one JSON request a line from standard input and writes one JSON answer a line to standard output; EOF
ends the process. `start` is answered with the process that serves, until the server ends by itself or by a
signal, and may be sent again. Every other request is answered on the server's event loop, between its
callbacks.

The server's process is a fork of one that only imports: when it is killed, the next one need not import torch
again, which takes 2.5 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import uvloop
import xgrammar  # noqa: F401 - the server imports it as it loads a model: half of the time of its start

from bench.chaos.json_sizes import JsonSizes

JSON_SIZES = JsonSizes()
JSON_SIZES.install()  # before any module of the server makes its decoders

import app.compose  # noqa: E402
import app.listen  # noqa: E402
import app.process  # noqa: E402
import app.server  # noqa: E402
from app.compose import Live, Progress  # noqa: E402
from app.http.server import Runner  # noqa: E402
from app.listen import bind  # noqa: E402
from app.logs import set_up  # noqa: E402
from app.settings import parse  # noqa: E402
from bench.chaos import counting  # noqa: E402
from bench.chaos.faults import FAULTS, Patches  # noqa: E402
from core.config import Config  # noqa: E402
from gpu.layers.linear import Linear  # noqa: E402


class Served:
    """The running server. Owner: its event loop; `loop` and `live` are read by the thread of `listen`."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.live: Live | None = None
        self.runner: Runner | None = None
        self.patches = Patches()

    def run(self, flags: Sequence[str], device: str) -> int:
        """Serve until the server ends. Returns the exit code."""
        config = parse(flags)
        set_up(config.serve.log_level)
        app.process.raise_file_limit()
        with Patches() as patches:
            patches.replace(app.server, "load", self._load)
            patches.replace(app.server, "Runner", self._runner)
            patches.replace(app.listen, "bind", _bind)
            if device == "tiny":
                # oneDNN caches up to a thousand compiled kernels, one for each number of rows, 0.3 MB each.
                # Without packed weights they are not used, and memory growth shows leaks of the server.
                patches.replace(Linear, "seal", lambda linear: None)
            if device == "counting":
                patches.replace(app.compose, "build_executor", counting.build_executor)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                self.loop = runner.get_loop()
                try:
                    return runner.run(app.server.Server(config).serve())
                finally:
                    self.loop = self.live = self.runner = None
                    self.patches.undo()

    def _load(self, config: Config, progress: Progress) -> Live:
        self.live = app.compose.load(config, progress)
        return self.live

    def _runner(self, *arguments: Any, **named: Any) -> Runner:
        self.runner = Runner(*arguments, **named)
        return self.runner

    # -- calls -------------------------------------------------------------------------------------

    def accounting(self) -> dict[str, Any]:
        """Pages, jobs, connections, tasks, threads, files and memory, to compare when the server is idle."""
        assert self.live is not None and self.loop is not None
        (engine,) = self.live.replicas.engines
        now = engine.load()
        try:
            engine.check_integrity()
            integrity = ""
        except Exception as error:
            integrity = f"{type(error).__name__}: {error}"
        return {
            **self.progress(),
            "pages": now.cache.total,
            "free": now.cache.free,
            "cached": now.cache.cached,
            "protected": now.cache.protected,
            "in_flight": now.in_flight,
            "integrity": integrity,
            "jobs": len(self.live.loaded.engine._runs),
            "connections": self._connections(),
            "tasks": sorted(_name(task) for task in asyncio.all_tasks(self.loop)),
            "threads": threading.active_count(),
            "files": len(os.listdir("/proc/self/fd")),
            "rss": _rss(),
            "decoded": JSON_SIZES.largest,
            "encoded": JSON_SIZES.largest_encoded,
        }

    def progress(self) -> dict[str, Any]:
        """Counters that change while requests run."""
        assert self.live is not None
        (engine,) = self.live.replicas.engines
        now = engine.load()
        return {
            "running": now.running,
            "waiting": now.waiting,
            "steps": now.steps,
            "output": now.output_tokens,
            "retractions": now.retractions,
            "finished": dict(engine.recorder.finished),
            "failure": engine.failure or "",
            "lag": engine.recorder.lag,
            "buffered": self._buffered(),
        }

    def _connections(self) -> int:
        server = self.runner.server if self.runner is not None else None
        return len(server.connections) if server is not None else 0

    def _buffered(self) -> int:
        """The largest write buffer of a connection, in bytes."""
        server = self.runner.server if self.runner is not None else None
        transports = [c.transport for c in server.connections] if server is not None else []
        # uvloop's transports are not subclasses of asyncio's.
        sizes = [cast(asyncio.WriteTransport, t).get_write_buffer_size() for t in transports if t is not None]
        return max(sizes, default=0)

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Handle one call."""
        match message["method"]:
            case "accounting":
                return self.accounting()
            case "progress":
                return self.progress()
            case "inject":
                assert self.live is not None
                FAULTS[message["name"]](self.patches, self.live)
            case "undo":
                self.patches.undo()
            case "reset_sizes":
                JSON_SIZES.reset()
        return {}


def _bind(host: str, port: int) -> socket.socket:
    """A listener with small socket buffers, so that bytes for a slow reader stay in the process."""
    listener = bind(host, port)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * 1024)
    return listener


def _name(task: asyncio.Task[Any]) -> str:
    return getattr(task.get_coro(), "__qualname__", "?")


def _rss() -> int:
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Keep one process that serves as requested on standard input, until one ends without an error."""
    # Prints of the server must not mix with the answers: they go to standard error.
    answers = os.dup(1)
    os.dup2(2, 1)

    def send(message: dict[str, Any]) -> None:
        os.write(answers, json.dumps(message).encode() + b"\n")

    gc.freeze()  # each server begins and ends with a collection, of its own objects
    while worker := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
        if code == 0:
            return
        send({"ended": code})
    _serve(send)


def _serve(send: Callable[[dict[str, Any]], None]) -> None:
    """Serve as requested, in this process."""
    served, starts = Served(), queue.SimpleQueue[dict[str, Any]]()
    lock = threading.Lock()

    def locked(message: dict[str, Any]) -> None:
        with lock:
            send(message)

    def answer(message: dict[str, Any]) -> None:
        try:
            result = served.answer(message)
        except Exception as error:
            result = {"error": repr(error)}
        locked({"id": message["id"], **result})

    def listen() -> None:
        for line in sys.stdin:
            message = json.loads(line)
            if message["method"] == "start":
                locked({"id": message["id"], "pid": os.getpid()})
                starts.put(message)
            elif (loop := served.loop) is not None and served.live is not None:
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(answer, message)
                    continue
                locked({"id": message["id"], "error": "the server has ended"})
            else:
                locked({"id": message["id"], "error": "no server runs"})
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        message = starts.get()
        gc.freeze()
        locked({"ended": served.run(message["flags"], message["device"])})


if __name__ == "__main__":
    main()
