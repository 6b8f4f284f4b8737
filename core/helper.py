"""Protocol of the helper process, for work that may never end or take all memory and so must be killable: a
native thread cannot be stopped, and cannot be kept from taking the GIL or the memory."""

from __future__ import annotations

from typing import Protocol

import msgspec

from core.errors import LoomError


class Task(msgspec.Struct, frozen=True):
    """The code that the helper runs on a payload.

    `target` names a class as `package.module:Class`. The helper makes it once with `state` and calls it with
    each payload; both, and its answer, are bytes. Names come from the program, never from a request.
    """

    target: str
    state: bytes = b""


class Worker(Protocol):
    """An instance of a task's class. Owner: the helper's only thread."""

    def __call__(self, payload: bytes) -> bytes:
        """Run one job. Faults that the client should hear of belong into the answer: an exception ends the
        job with `Failed`."""
        ...


class Helper(Protocol):
    """A queue in front of one process: jobs run one by one, in the order they came. Owner: event loop."""

    async def run(self, task: Task, payload: bytes, seconds: float) -> bytes:
        """The answer to `payload`. Raises `Exceeded` when the job passes `seconds` or its memory, `Failed`
        when it raises, and `Overloaded` when too many wait or the process does not start.

        Cancelling a job that runs kills the process; the next job starts another.
        """
        ...

    def close(self) -> None:
        """Kill the process. Idempotent."""
        ...


class Exceeded(LoomError):
    """The job exceeded a limit and was killed. The message is a predicate: "takes longer than 5 s"."""


class Failed(LoomError):
    """The job raised: a fault of the program."""
