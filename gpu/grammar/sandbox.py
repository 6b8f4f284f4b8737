"""The helper process: `python -m gpu.grammar.sandbox FD`, driven over its standard streams.

FD is a file with the msgpack of a `TokenTable`. Each message is (kind, text), or ("load", kind) before
it, and is answered with a refusal or an empty string. It ends with its standard input.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import BinaryIO

import msgspec

from core.grammar import TokenTable
from gpu.grammar.llg import LlgBackend
from gpu.grammar.schema import Refused
from gpu.grammar.wire import read_frame, write_frame
from gpu.grammar.xgr import XgrBackend

MEMORY = 2**30
"""Bytes of address space that one compile may add."""
NICE = 10
"""Streams come first where cores are few: on two of them a compile at equal priority tripled the p95 of
a neighbour's gaps."""
CPU_SECONDS = 15
"""Processor time of one compile, should the server die before it can kill us."""


class Sandbox:
    """Compiles and throws away. Owner: the helper's only thread."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._backends: dict[bool, LlgBackend | XgrBackend] = {}

    def answer(self, kind: str, text: str) -> str:
        """Why `text` is refused, or nothing."""
        if kind == "load":
            self._backend(text)
            return ""
        backend = self._backend(kind)
        _limit()
        try:
            backend.compile(kind, text)
        except Refused as error:
            return str(error)
        except MemoryError:
            return "The constraint takes more than 1 GB of memory to compile."
        return ""

    def _backend(self, kind: str) -> LlgBackend | XgrBackend:
        tags = kind == "structural_tag"
        if tags not in self._backends:
            size = os.fstat(self._fd).st_size
            table = msgspec.msgpack.decode(os.pread(self._fd, size, 0), type=TokenTable)
            self._backends[tags] = XgrBackend(table, 1) if tags else LlgBackend(table, 1)
        return self._backends[tags]


def _limit() -> None:
    """Bound what comes on top of what is there: the libraries alone map gigabytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    mapped = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, resource.RLIM_INFINITY))
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))


def main(fd: int, source: BinaryIO, sink: BinaryIO) -> None:
    """Serve until `source` ends."""
    os.nice(NICE)
    sandbox = Sandbox(fd)
    while (frame := read_frame(source)) is not None:
        kind, text = msgspec.msgpack.decode(frame, type=tuple[str, str])
        write_frame(sink, msgspec.msgpack.encode(sandbox.answer(kind, text)))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.stdin.buffer, sys.stdout.buffer)
