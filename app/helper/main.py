"""The helper process: `python -m app.helper.main`. It serves a socket and ends when that is closed."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import resource
import signal
import socket
import sys
from pathlib import Path

import msgspec

from app.helper.wire import MEMORY, TOO_LARGE, Answer, Load, Run, Wire
from core.helper import Worker

NICE = 10
"""Streams have priority: on two cores, a grammar compiled at equal priority tripled other streams' p95
inter-token latency."""
CPU_SECONDS = 15
"""CPU seconds of one job (RLIMIT_CPU), in case the server cannot kill this process."""
_PDEATHSIG = 1


class Workers:
    """Workers by number. Owner: the process's only thread."""

    def __init__(self) -> None:
        self._made: dict[int, Worker] = {}

    def answer(self, message: Load | Run, blob: bytes) -> tuple[Answer, bytes]:
        """The answer to a message. Never raises."""
        try:
            if isinstance(message, Load):
                if message.key not in self._made:
                    self._made[message.key] = _make(message.target, blob)
                return Answer(), b""
            _limit()
            return Answer(), self._made[message.key](blob)
        except MemoryError:
            return Answer(exceeded=TOO_LARGE), b""
        except Exception as error:  # fails this job only; the server logs it
            return Answer(failed=f"{type(error).__name__}: {error}"[:1_000]), b""


def _make(target: str, state: bytes) -> Worker:
    module, _, name = target.partition(":")
    worker: Worker = getattr(importlib.import_module(module), name)(state)
    return worker


def _limit() -> None:
    """Limit what this job adds in memory and CPU: the libraries alone map gigabytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    mapped = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, resource.RLIM_INFINITY))
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))


def main(wire: Wire) -> None:
    """Serve until the other end closes. The process is killed when the server dies, even during a job."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    os.nice(NICE)
    workers = Workers()
    with contextlib.suppress(EOFError):
        while True:
            head, blob = wire.receive()
            wire.send(*workers.answer(_DECODER.decode(head), blob))


_DECODER: msgspec.msgpack.Decoder[Load | Run] = msgspec.msgpack.Decoder(Load | Run)

if __name__ == "__main__":
    main(Wire(socket.socket(fileno=int(sys.argv[1]))))
