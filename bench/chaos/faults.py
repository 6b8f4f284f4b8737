"""Faults that are put into a running server: those of broken parts, and those that `--break` seeds.

Each takes the patches to add to and the live server, on its loop. Those of stages strike once, a few calls
later, as a part that breaks in the middle of work does.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import Any, Self

from jinja2.sandbox import SandboxedEnvironment

import app.batch.store
import app.http.body
from app.compose import Live
from app.engine.loop import Engine
from app.engine.metrics import Recorder
from app.engine.output import Stream
from app.http.connection import Connection
from app.http.sse import EventStream
from app.server import Server
from app.text.tokenizer import Tokenizer
from bench.chaos.opened import HELPER, OPENED, everything
from core.cache.radix import RadixTree
from core.errors import RequestError
from core.plan import StepFailure
from core.request import Request
from core.request.request import State
from core.schedule.queue import Waiting
from core.schedule.scheduler import Scheduler
from gpu.executor import LocalExecutor
from gpu.grammar import Compiler
from gpu.runner import ModelRunner
from gpu.step.launched import LaunchedStep
from gpu.step.sampling import SamplingStage

AFTER = 20
"""Calls of the stage that still succeed."""


class Patches:
    """Attributes that were replaced, and what they were. A context manager that undoes them."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute until `undo`."""
        before = vars(owner)[name]
        setattr(owner, name, value)
        self.after(lambda: setattr(owner, name, before))

    def after(self, act: Callable[[], None]) -> None:
        """Do this too when everything is undone."""
        self._undo.append(act)

    def undo(self) -> None:
        """As before."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()


Fault = Callable[[Patches, Live], None]


def once(owner: Any, name: str, error: BaseException, after: int = AFTER) -> Fault:
    """The call of `owner.name` after so many raises `error`."""

    def install(patches: Patches, live: Live) -> None:
        original = vars(owner)[name]
        left = after

        def struck(*arguments: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left == -1:
                raise error
            return original(*arguments, **named)

        patches.replace(owner, name, struck)

    return install


def instead(owner: Any, name: str, make: Callable[[Any], Any]) -> Fault:
    """`owner.name` becomes what `make` makes of it."""

    def install(patches: Patches, live: Live) -> None:
        patches.replace(owner, name, make(vars(owner)[name]))

    return install


def few_files(patches: Patches, live: Live) -> None:
    """No more descriptors than are open now."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), before[1]))
    patches.after(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, before))


def _nothing(original: Any) -> Any:
    def ignored(*arguments: Any, **named: Any) -> None:
        return None

    return ignored


def _skips_tokens(original: Any) -> Any:
    def feed(stream: Stream, token: int, logprobs: Any) -> Any:
        if stream.count == 5:
            stream.count += 1
            return None
        return original(stream, token, logprobs)

    return feed


def _locks_twice(original: Any) -> Any:
    calls = 0

    def lock(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            original(*arguments, **named)
        return original(*arguments, **named)

    return lock


def _changes_a_token(original: Any) -> Any:
    def move(request: Request, state: State) -> None:
        original(request, state)
        if state is State.RETRACTED and request.output:
            request.output[-1] = 65

    return move


def _cuts(original: Any) -> Any:
    async def drain(server: Server, submitter: Any) -> None:
        submitter.drain()

    return drain


def _without_failures(original: Any) -> Any:
    def results(executor: LocalExecutor) -> list[Any]:
        return [each for each in original(executor) if not isinstance(each, StepFailure)]

    return results


def _breaks(original: Any) -> Any:
    def broken(*arguments: Any, **named: Any) -> Any:
        raise RuntimeError("a part that is broken")

    return broken


def _keeps(original: Any) -> Any:
    kept: list[bytearray] = []

    def add(engine: Engine, requests: Any, streams: Any) -> None:
        kept.append(bytearray(b"x") * 2**22)
        original(engine, requests, streams)

    return add


def _decodes(original: Any) -> Any:
    async def arrived(*arguments: Any) -> bytes:
        data: bytes = await original(*arguments)
        with contextlib.suppress(ValueError, RecursionError):
            json.loads(data)
        return data

    return arrived


def _unseen(original: Any) -> Any:
    def send(stream: EventStream, event: bytes) -> None:
        original(stream, event)
        stream.congested = False

    return send


def open_sandbox(patches: Patches, live: Live) -> None:
    """Templates see every attribute; in processes that are started from now on, too."""
    patches.replace(SandboxedEnvironment, "is_safe_attribute", everything)
    start = subprocess.Popen

    def opened(arguments: Sequence[str], **named: Any) -> Any:
        return start([OPENED if each == HELPER else each for each in arguments], **named)

    patches.replace(subprocess, "Popen", opened)


def hanging_launch(patches: Patches, live: Live) -> None:
    """The next step never comes back, until everything is undone."""
    released = threading.Event()

    def hang(original: Any) -> Any:
        def launch(runner: ModelRunner, plan: Any) -> Any:
            released.wait()
            return original(runner, plan)

        return launch

    instead(ModelRunner, "launch", hang)(patches, live)
    patches.after(released.set)


STAGES: dict[str, Fault] = {
    "plan": once(Scheduler, "plan", RuntimeError("injected into plan")),
    "apply": once(Scheduler, "apply", RuntimeError("injected into apply")),
    "deliver": once(Recorder, "ended", RuntimeError("injected into deliver"), 2),
    "feed": once(Stream, "feed", RuntimeError("injected into feed"), 5 * AFTER),
    "launch": once(ModelRunner, "launch", RuntimeError("injected into launch")),
    "wait": once(LaunchedStep, "wait", RuntimeError("injected into wait")),
    "sample": once(SamplingStage, "launch", RuntimeError("injected into sample")),
    "compile": once(Compiler, "compile", RuntimeError("injected into compile"), 0),
    "tokenize": once(Tokenizer, "encode_async", RuntimeError("injected into tokenize"), 0),
    "disk": once(app.batch.store.Disk, "add_file", OSError(errno.ENOSPC, "No space left on device"), 0),
    "fds": few_files,
}

FAULTS: dict[str, Fault] = {
    **STAGES,
    "launch hangs": hanging_launch,
    "hangs end nothing": instead(Engine, "hang", _nothing),
    "refusals raise": instead(RequestError, "__init__", _breaks),
    "aborts are lost": instead(Engine, "abort", _nothing),
    "a token is skipped": instead(Stream, "feed", _skips_tokens),
    "a lock is kept": instead(RadixTree, "lock", _locks_twice),
    "retraction changes a token": instead(Request, "move", _changes_a_token),
    "the queue has no bound": instead(Waiting, "check_room", _nothing),
    "the drain cuts": instead(Server, "_drain", _cuts),
    "failures are silent": instead(LocalExecutor, "results", _without_failures),
    "bodies are decoded on the loop": instead(app.http.body, "_arrived", _decodes),
    "congestion is not seen": instead(EventStream, "_send", _unseen),
    "the sandbox is open": open_sandbox,
    "compiling breaks": instead(Compiler, "compile", _breaks),
    "bad HTTP breaks": instead(Connection, "handle_error", _breaks),
    "requests are kept": instead(Engine, "add", _keeps),
}
