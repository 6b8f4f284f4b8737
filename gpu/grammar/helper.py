"""A process that compiles what might never end, and that can be killed for it.

A native thread cannot be stopped and cannot be kept from taking all memory; a process can. It is a
fresh interpreter, started when first needed: a fork of a process with threads can deadlock.
"""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec

from core.clock import monotonic
from core.errors import Overloaded
from core.grammar import TokenTable
from gpu.grammar.schema import Refused
from gpu.grammar.wire import LENGTH, frame

SECONDS = 5.0
"""Wall time of one compile."""
START_SECONDS = 60.0
"""To import the libraries and to read the vocabulary: 2 to 5 s."""
MAX_WAITING = 16
"""Compiles that may be under way or wait; each may take the helper 5 s."""


class Gone(Exception):
    """The process has ended, or somebody killed it."""


class Child:
    """The process and its two pipes. Owner: the helper's thread; `kill` may come from any."""

    __slots__ = ("_process",)

    def __init__(self, table: int) -> None:
        self._process = subprocess.Popen(
            (sys.executable, "-m", "gpu.grammar.sandbox", str(table)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # the libraries print tokens and schemas there
            bufsize=0,
            pass_fds=(table,),
        )

    def exchange(self, kind: str, text: str, seconds: float) -> str:
        """Send a message, wait for the answer. Raises `TimeoutError` or `Gone`."""
        assert self._process.stdin is not None
        deadline = monotonic() + seconds
        data = memoryview(frame(msgspec.msgpack.encode((kind, text))))
        try:
            while data:
                data = data[self._process.stdin.write(data) :]
        except BrokenPipeError as error:
            raise Gone from error
        (length,) = LENGTH.unpack(self._read(LENGTH.size, deadline))
        return msgspec.msgpack.decode(self._read(length, deadline), type=str)

    def _read(self, length: int, deadline: float) -> bytes:
        assert self._process.stdout is not None
        data = b""
        while len(data) < length:
            left = deadline - monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                raise TimeoutError
            chunk = self._process.stdout.read(length - len(data))
            if not chunk:
                raise Gone
            data += chunk
        return data

    def kill(self) -> None:
        """End it now. Whoever reads from it sees `Gone`."""
        self._process.kill()

    def reap(self) -> None:
        """Kill it, take its exit status, close the pipes."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class Helper:
    """One helper process, one compile at a time.

    Owner: event loop; `_try` and what it calls run on the one thread of the pool.
    """

    __slots__ = ("_child", "_closed", "_lock", "_pool", "_seconds", "_table", "_waiting")

    def __init__(self, table: TokenTable, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        # A file without a name, open for as long as a child may start: 6 MB would block a pipe.
        self._table, path = tempfile.mkstemp()
        os.unlink(path)
        with open(self._table, "wb", closefd=False) as file:
            file.write(msgspec.msgpack.encode(table))
        self._closed = False
        self._waiting = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar-helper")
        self._lock = asyncio.Lock()
        self._child: Child | None = None

    async def probe(self, kind: str, text: str) -> None:
        """Compile there. Raises `Refused` for what it answers or when it passes its limits, and
        `Overloaded` when too many wait or the process does not start.

        Cancelling kills the process: it may be at work for minutes.
        """
        if self._waiting >= MAX_WAITING:
            raise Overloaded("Too many large grammars are being compiled.", SECONDS)
        self._waiting += 1
        try:
            refusal = await self._turn(kind, text)
        finally:
            self._waiting -= 1
        if refusal:
            raise Refused(refusal)

    async def _turn(self, kind: str, text: str) -> str:
        async with self._lock:
            left = threading.Event()
            work = asyncio.get_running_loop().run_in_executor(self._pool, self._try, kind, text, left)
            try:
                return await work
            except asyncio.CancelledError:
                left.set()
                if self._child is not None:
                    self._child.kill()
                raise

    def close(self) -> None:
        """Kill the process. Idempotent."""
        if not self._closed:
            self._closed = True  # before the look at the child: `_loaded` makes one and looks here then
            if self._child is not None:
                self._child.kill()
            self._pool.submit(self._drop)
            self._pool.shutdown()
            os.close(self._table)

    def _try(self, kind: str, text: str, left: threading.Event) -> str:
        """The refusal, or nothing. `left` is set when nobody waits any more."""
        try:
            child = self._loaded(kind)
        except (OSError, TimeoutError, Gone) as error:
            self._drop()
            raise Overloaded("The process that compiles large grammars did not start.") from error
        if left.is_set():
            return ""
        try:
            return child.exchange(kind, text, self._seconds)
        except TimeoutError:
            refusal = f"The constraint takes longer than {self._seconds:g} s to compile."
        except Gone:
            refusal = "The constraint takes more than 1 GB of memory to compile."
        self._drop()
        return refusal

    def _loaded(self, kind: str) -> Child:
        """A process that has what `kind` needs: that is no part of a compile's time."""
        if self._child is not None:
            try:
                self._child.exchange("load", kind, START_SECONDS)
                return self._child
            except (TimeoutError, Gone):  # killed, when the compile before this one was given up
                self._drop()
        self._child = child = Child(self._table)
        if self._closed:
            raise Gone
        child.exchange("load", kind, START_SECONDS)
        return child

    def _drop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.reap()
