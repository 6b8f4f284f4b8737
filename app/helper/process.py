"""A process for work that might never end: started on first use, killed when a job exceeds its limits.

It is a new interpreter: a fork of a process with threads can deadlock.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec

from app.helper.wire import TOO_LARGE, Answer, Load, Run, Wire
from core.errors import Overloaded
from core.helper import Exceeded, Failed, Task

START_SECONDS = 60.0
"""Timeout to import a task's libraries and load its state: 2 to 5 s for a grammar's vocabulary."""
MAX_WAITING = 16
"""Jobs that may run or wait in one queue, each for seconds."""
MAX_SIZED = 8_192
"""Jobs in one queue of `HelpersBySize`, each of milliseconds."""
LONG = 2**20
"""Bytes of a payload that goes to the process for long ones."""


class ProcessEnded(Exception):
    """The process has ended or was killed."""


class Child:
    """The process and the socket to it. Owner: the helper's thread; `kill` may come from any."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._wire = Wire(ours)
        with theirs:
            self._process = subprocess.Popen(
                (sys.executable, "-m", "app.helper.main", str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # the libraries print tokens and schemas there
            )
        self._keys: dict[Task, int] = {}
        self._loaded: set[int] = set()

    def load(self, task: Task) -> None:
        """Load `task` unless it is loaded. Raises `TimeoutError` or `ProcessEnded`."""
        key = self._keys.setdefault(task, len(self._keys))
        known = key in self._loaded
        answer, _ = self._exchange(Load(key, task.target), b"" if known else task.state, START_SECONDS)
        if answer.failed or answer.exceeded:
            raise ProcessEnded(answer.failed or answer.exceeded)
        self._loaded.add(key)

    def run(self, task: Task, payload: bytes, seconds: float) -> tuple[Answer, bytes]:
        """Run a job of a loaded task. Raises `TimeoutError` or `ProcessEnded`."""
        return self._exchange(Run(self._keys[task]), payload, seconds)

    def _exchange(self, head: Load | Run, blob: bytes, seconds: float) -> tuple[Answer, bytes]:
        self._wire.limit(seconds)
        try:
            self._wire.send(head, blob)
            answer, data = self._wire.receive()
        except BlockingIOError:
            raise TimeoutError from None
        except (EOFError, OSError) as error:
            raise ProcessEnded from error
        return msgspec.msgpack.decode(answer, type=Answer), data

    def kill(self) -> None:
        """Kill it. A thread that reads from it gets `ProcessEnded`."""
        self._process.kill()

    def reap(self) -> None:
        """Kill it, wait for it, close the socket."""
        self._process.kill()
        self._process.wait()
        self._wire.close()


class HelperProcess:
    """`core.helper.Helper`: one process, one job at a time.

    Owner: event loop; `_try` and what it calls run on the one thread of the pool.
    """

    def __init__(self, most: int = MAX_WAITING) -> None:
        """At most `most` jobs may run or wait."""
        self._most = most
        self._closed = False
        self._waiting = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="helper")
        self._lock = asyncio.Lock()
        self._child: Child | None = None

    async def run(self, task: Task, payload: bytes, seconds: float) -> bytes:
        """See `core.helper.Helper.run`."""
        if self._waiting >= self._most:
            raise Overloaded("Too many requests that take long to check are waiting.", seconds)
        self._waiting += 1
        try:
            answer, data = await self._turn(task, payload, seconds)
        finally:
            self._waiting -= 1
        if answer.exceeded:
            raise Exceeded(answer.exceeded)
        if answer.failed:
            raise Failed(f"the helper process: {task.target}: {answer.failed}")
        return data

    async def _turn(self, task: Task, payload: bytes, seconds: float) -> tuple[Answer, bytes]:
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
            self._closed = True  # set before reading `_child`: `_ready` checks it after making one
            if self._child is not None:
                self._child.kill()
            self._pool.submit(self._drop)
            self._pool.shutdown()

    def _try(self, task: Task, payload: bytes, seconds: float, left: threading.Event) -> tuple[Answer, bytes]:
        """Run one job. `left` is set when its caller was cancelled."""
        try:
            child = self._ready(task)
        except (OSError, TimeoutError, ProcessEnded) as error:
            self._drop()
            raise Overloaded("The process that checks such requests did not start.") from error
        if left.is_set():
            return Answer(), b""
        try:
            return child.run(task, payload, seconds)
        except TimeoutError:
            answer = Answer(exceeded=f"takes longer than {seconds:g} s")
        except ProcessEnded:
            answer = Answer(exceeded=TOO_LARGE)
        self._drop()
        return answer, b""

    def _ready(self, task: Task) -> Child:
        """A process with `task` loaded, which is not counted as time of a job."""
        if self._child is not None:
            try:
                self._child.load(task)
                return self._child
            except (TimeoutError, ProcessEnded):  # killed when the previous job was cancelled
                self._drop()
        self._child = child = Child()
        if self._closed:
            raise ProcessEnded
        child.load(task)
        return child

    def _drop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.reap()


class HelpersBySize:
    """`core.helper.Helper` over two processes: short payloads never wait for long ones. Owner: event loop."""

    def __init__(self) -> None:
        self._short, self._long = HelperProcess(MAX_SIZED), HelperProcess(MAX_SIZED)

    async def run(self, task: Task, payload: bytes, seconds: float) -> bytes:
        """See `core.helper.Helper.run`."""
        helper = self._short if len(payload) < LONG else self._long
        return await helper.run(task, payload, seconds)

    def close(self) -> None:
        """Kill both. Idempotent."""
        self._short.close()
        self._long.close()
