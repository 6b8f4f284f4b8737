"""The helper process: `python -m app.helper.main`, driven over its standard streams, ended with its input."""

from __future__ import annotations

import ctypes
import importlib
import os
import resource
import signal
import sys
from pathlib import Path
from typing import BinaryIO

import msgspec

from app.helper.wire import MEMORY, TOO_LARGE, Answer, Load, Run, read_frame, write_frame
from core.helper import Worker

NICE = 10
"""Streams come first where cores are few: on two of them a compile at equal priority tripled the p95 of
a neighbour's gaps."""
CPU_SECONDS = 15
"""Processor time of one job, should the server be unable to kill us."""
_PDEATHSIG = 1


class Workers:
    """Workers by their names. Owner: the process's only thread."""

    def __init__(self) -> None:
        self._made: dict[str, Worker] = {}

    def answer(self, message: Load | Run) -> Answer:
        """What is sent back, whatever happens."""
        try:
            if isinstance(message, Load):
                if message.target not in self._made:
                    self._made[message.target] = _make(message)
                return Answer()
            _limit()
            return Answer(self._made[message.target](message.payload))
        except MemoryError:
            return Answer(exceeded=TOO_LARGE)
        except Exception as error:  # ends this job alone; the server logs it
            return Answer(failed=f"{type(error).__name__}: {error}"[:1_000])


def _make(load: Load) -> Worker:
    module, _, name = load.target.partition(":")
    worker: Worker = getattr(importlib.import_module(module), name)(load.state)
    return worker


def _limit() -> None:
    """Bound what comes on top of what is there: the libraries alone map gigabytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    mapped = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, resource.RLIM_INFINITY))
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))


def main(source: BinaryIO, sink: BinaryIO) -> None:
    """Serve until `source` ends or the server dies, even in the middle of a job."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    os.nice(NICE)
    workers = Workers()
    while (data := read_frame(source)) is not None:
        write_frame(sink, msgspec.msgpack.encode(workers.answer(_DECODER.decode(data))))


_DECODER: msgspec.msgpack.Decoder[Load | Run] = msgspec.msgpack.Decoder(Load | Run)

if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
