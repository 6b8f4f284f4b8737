"""A process for what might never end, started when first needed and killed when it passes its limits.

It is a fresh interpreter: a fork of a process with threads can deadlock.
"""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec

from app.helper.wire import LENGTH, TOO_LARGE, Answer, Load, Run, frame
from core.clock import monotonic
from core.errors import Overloaded
from core.helper import Exceeded, Failed, Task

START_SECONDS = 60.0
"""To import a task's libraries and to read its state: 2 to 5 s for a grammar's vocabulary."""
MAX_WAITING = 16
"""Jobs that may be under way or wait in one queue."""


class Gone(Exception):
    """The process has ended, or somebody killed it."""


class Child:
    """The process and its two pipes. Owner: the helper's thread; `kill` may come from any."""

    __slots__ = ("_loaded", "_process", "_sink", "_source")

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            (sys.executable, "-m", "app.helper.main"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # the libraries print tokens and schemas there
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._sink, self._source = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._sink, False)  # a write is cut to what the pipe takes, and never waits
        self._loaded: set[str] = set()

    def load(self, task: Task) -> None:
        """See that `task` can be run. Raises `TimeoutError` or `Gone`."""
        state = b"" if task.target in self._loaded else task.state
        answer = self.exchange(Load(task.target, state), START_SECONDS)
        if answer.failed or answer.exceeded:
            raise Gone(answer.failed or answer.exceeded)
        self._loaded.add(task.target)

    def exchange(self, message: Load | Run, seconds: float) -> Answer:
        """Send a message, wait for the answer. Raises `TimeoutError` or `Gone`."""
        deadline = monotonic() + seconds
        data = memoryview(frame(msgspec.msgpack.encode(message)))
        try:
            while data:
                self._wait((), (self._sink,), deadline)
                data = data[os.write(self._sink, data) :]
        except BrokenPipeError as error:
            raise Gone from error
        (length,) = LENGTH.unpack(self._read(LENGTH.size, deadline))
        return msgspec.msgpack.decode(self._read(length, deadline), type=Answer)

    def _read(self, length: int, deadline: float) -> bytearray:
        data = bytearray(length)
        rest = memoryview(data)
        while rest:
            self._wait((self._source,), (), deadline)
            count = os.readv(self._source, (rest,))
            if not count:
                raise Gone
            rest = rest[count:]
        return data

    @staticmethod
    def _wait(source: tuple[int, ...], sink: tuple[int, ...], deadline: float) -> None:
        left = deadline - monotonic()
        if left <= 0 or not any(select.select(source, sink, (), left)):
            raise TimeoutError

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


class HelperProcess:
    """`core.helper.Helper`: one process, one job at a time.

    Owner: event loop; `_try` and what it calls run on the one thread of the pool.
    """

    __slots__ = ("_child", "_closed", "_lock", "_pool", "_waiting")

    def __init__(self) -> None:
        self._closed = False
        self._waiting = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="helper")
        self._lock = asyncio.Lock()
        self._child: Child | None = None

    async def run(self, task: Task, payload: bytes, seconds: float) -> bytes:
        """See `core.helper.Helper.run`."""
        if self._waiting >= MAX_WAITING:
            raise Overloaded("Too many requests that take long to check are waiting.", seconds)
        self._waiting += 1
        try:
            answer = await self._turn(task, payload, seconds)
        finally:
            self._waiting -= 1
        if answer.exceeded:
            raise Exceeded(answer.exceeded)
        if answer.failed:
            raise Failed(f"the helper process: {task.target}: {answer.failed}")
        return answer.data

    async def _turn(self, task: Task, payload: bytes, seconds: float) -> Answer:
        async with self._lock:
            left = threading.Event()
            loop = asyncio.get_running_loop()
            work = loop.run_in_executor(self._pool, self._try, task, payload, seconds, left)
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
            self._closed = True  # before the look at the child: `_ready` makes one and looks here then
            if self._child is not None:
                self._child.kill()
            self._pool.submit(self._drop)
            self._pool.shutdown()

    def _try(self, task: Task, payload: bytes, seconds: float, left: threading.Event) -> Answer:
        """What came of it. `left` is set when nobody waits any more."""
        try:
            child = self._ready(task)
        except (OSError, TimeoutError, Gone) as error:
            self._drop()
            raise Overloaded("The process that checks such requests did not start.") from error
        if left.is_set():
            return Answer()
        try:
            return child.exchange(Run(task.target, payload), seconds)
        except TimeoutError:
            answer = Answer(exceeded=f"takes longer than {seconds:g} s")
        except Gone:
            answer = Answer(exceeded=TOO_LARGE)
        self._drop()
        return answer

    def _ready(self, task: Task) -> Child:
        """A process that has what `task` needs: that is no part of a job's time."""
        if self._child is not None:
            try:
                self._child.load(task)
                return self._child
            except (TimeoutError, Gone):  # killed, when the job before this one was given up
                self._drop()
        self._child = child = Child()
        if self._closed:
            raise Gone
        child.load(task)
        return child

    def _drop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.reap()
