"""Commands that the executor is carrying out, and waits until no step is in flight."""

from __future__ import annotations

import asyncio

from core.command import BESIDE, TAGS, Action, Command, CommandDone, Tag
from core.errors import EngineFailed, RequestError
from core.executor import Executor


class Commands:
    """Commands to the executor and their answers.

    Owner: event loop.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._count = 0
        self._failure: str | None = None
        self._open: dict[int, asyncio.Future[None]] = {}
        self._blocking: set[int] = set()
        self._quiet: list[asyncio.Future[None]] = []

    @property
    def blocking(self) -> bool:
        """Whether steps wait for a command that has no answer yet."""
        return bool(self._blocking)

    async def carry_out(
        self, action: Action, path: str = "", tags: tuple[Tag, ...] = TAGS, adapter: str = "", place: int = -1
    ) -> None:
        """Send a command and wait until it is done. Raises `RequestError` with the executor's reason when it
        failed, and `EngineFailed` when the executor is lost."""
        self._check()
        command = Command(id=self._count, action=action, path=path, tags=tags, adapter=adapter, place=place)
        self._count += 1
        future = self._open[command.id] = asyncio.get_running_loop().create_future()
        if action not in BESIDE:
            self._blocking.add(command.id)
        self._executor.command(command)
        await future

    def settle(self, done: CommandDone) -> None:
        """Hand the executor's answer to the caller that waits for the command."""
        future = self._open.pop(done.id)
        self._blocking.discard(done.id)
        if future.done():
            return  # the caller was cancelled; the command was carried out all the same
        if done.error is None:
            future.set_result(None)
        else:
            future.set_exception(RequestError(done.error, code="order_refused"))

    async def quiet(self, in_flight: int) -> None:
        """Wait until no step is in flight. Raises `EngineFailed`."""
        self._check()
        if in_flight:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._quiet.append(future)
            await future

    def is_quiet(self) -> None:
        """End the waits in `quiet`: no step is in flight now."""
        for future in self._quiet:
            if not future.done():
                future.set_result(None)
        self._quiet.clear()

    def fail(self, reason: str) -> None:
        """End commands and waits with `EngineFailed`, now and later: the executor is lost."""
        self._failure = reason
        for future in (*self._open.values(), *self._quiet):
            if not future.done():
                future.set_exception(EngineFailed(reason))
        self._open.clear()
        self._quiet.clear()

    def _check(self) -> None:
        if self._failure is not None:
            raise EngineFailed(self._failure)
