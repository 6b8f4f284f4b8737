"""Operations that a client begins and that its disconnect must not leave half done."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from core.errors import LoomError

log = logging.getLogger(__name__)

S = TypeVar("S", bound="Shielded")
P = ParamSpec("P")
T = TypeVar("T")


def shielded(
    method: Callable[Concatenate[S, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Make a method run in a task of its own, even if its caller is cancelled. The result is logged."""

    async def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.shield(self._begin(method.__name__, method(self, *args, **kwargs)))

    functools.update_wrapper(run, method)
    return run


class Shielded:
    """Base class of classes with `shielded` methods. Owner: event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def _begin(self, name: str, work: Coroutine[Any, Any, T], level: int = logging.INFO) -> asyncio.Task[T]:
        """Run `work` in a task. `level` is that of the log line when it succeeds."""
        name = f"{type(self).__name__.lower()} {name}"
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)  # the loop holds only weak references to tasks
        task.add_done_callback(partial(self._ended, level))
        return task

    def _ended(self, level: int, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            log.warning("%s: cancelled, the server is shutting down", task.get_name())
        elif (error := task.exception()) is None:
            log.log(level, "%s: done", task.get_name())
        elif isinstance(error, LoomError):
            log.warning("%s: refused: %s", task.get_name(), error)
        else:
            log.error("%s: failed", task.get_name(), exc_info=error)
