"""Faults that are injected into a running server: those of the rows themselves, and those of `--break`.

Each takes the patches to add to and the live server, on its event loop. The faults of `STAGES` raise once, a
few calls later, so that they occur in the middle of work.
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
from bench.chaos.unsandboxed import HELPER, UNSANDBOXED, allow_everything
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
"""Calls of the stage that succeed before the fault."""


class Patches:
    """Replaces attributes and restores them, also as a context manager."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute until `undo`."""
        before = vars(owner)[name]
        setattr(owner, name, value)
        self.on_undo(lambda: setattr(owner, name, before))

    def on_undo(self, action: Callable[[], None]) -> None:
        """Call `action` in `undo`."""
        self._undo.append(action)

    def undo(self) -> None:
        """Restore all attributes, the last one first."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()


Fault = Callable[[Patches, Live], None]


def once(owner: Any, name: str, error: BaseException, after: int = AFTER) -> Fault:
    """`owner.name` raises `error` once, after `after` successful calls."""

    def install(patches: Patches, live: Live) -> None:
        original = vars(owner)[name]
        left = after

        def raising(*arguments: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left == -1:
                raise error
            return original(*arguments, **named)

        patches.replace(owner, name, raising)

    return install


def wrapped(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Fault:
    """Replace `owner.name` by `wrap(owner.name)`."""

    def install(patches: Patches, live: Live) -> None:
        patches.replace(owner, name, wrap(vars(owner)[name]))

    return install


def limit_files(patches: Patches, live: Live) -> None:
    """Lower the limit of file descriptors to those that are open now."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), before[1]))
    patches.on_undo(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, before))


def _ignore_call(original: Any) -> Any:
    def ignored(*arguments: Any, **named: Any) -> None:
        return None

    return ignored


def _skip_token(original: Any) -> Any:
    calls = 0

    def feed(stream: Stream, tokens: list[int], logprobs: Any) -> Any:
        # Not at a number of tokens: how many come together depends on the load.
        nonlocal calls
        calls += 1
        if calls % 5 == 0:
            stream.count += len(tokens)
            return None
        return original(stream, tokens, logprobs)

    return feed


def _lock_twice(original: Any) -> Any:
    calls = 0

    def lock(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            original(*arguments, **named)
        return original(*arguments, **named)

    return lock


def _lose_token(original: Any) -> Any:
    def move(request: Request, state: State) -> None:
        original(request, state)
        if state is State.RETRACTED and request.output:
            # Not the last one, which would be sampled again: that shows only if it was delivered before.
            del request.output[0]

    return move


def _skip_drain(original: Any) -> Any:
    async def drain(server: Server, submitter: Any) -> None:
        submitter.drain()

    return drain


def _drop_failures(original: Any) -> Any:
    def results(executor: LocalExecutor) -> list[Any]:
        return [each for each in original(executor) if not isinstance(each, StepFailure)]

    return results


def _always_raise(original: Any) -> Any:
    def broken(*arguments: Any, **named: Any) -> Any:
        raise RuntimeError("injected")

    return broken


def _leak_memory(original: Any) -> Any:
    kept: list[bytearray] = []

    def add(engine: Engine, requests: Any, streams: Any) -> None:
        kept.append(bytearray(b"x") * 2**22)
        original(engine, requests, streams)

    return add


def _decode_on_loop(original: Any) -> Any:
    async def arrived(*arguments: Any) -> bytes:
        data: bytes = await original(*arguments)
        with contextlib.suppress(ValueError, RecursionError):
            json.loads(data)
        return data

    return arrived


def _ignore_congestion(original: Any) -> Any:
    def send(stream: EventStream, event: bytes) -> None:
        original(stream, event)
        stream.congested = False

    return send


def disable_sandbox(patches: Patches, live: Live) -> None:
    """Let templates access every attribute, here and in helper processes started from now on."""
    patches.replace(SandboxedEnvironment, "is_safe_attribute", allow_everything)
    start = subprocess.Popen

    def unsandboxed(arguments: Sequence[str], **named: Any) -> Any:
        return start([UNSANDBOXED if each == HELPER else each for each in arguments], **named)

    patches.replace(subprocess, "Popen", unsandboxed)


def hang_launch(patches: Patches, live: Live) -> None:
    """The next step hangs until the patches are undone."""
    released = threading.Event()

    def hang(original: Any) -> Any:
        def launch(runner: ModelRunner, plan: Any) -> Any:
            released.wait()
            return original(runner, plan)

        return launch

    wrapped(ModelRunner, "launch", hang)(patches, live)
    patches.on_undo(released.set)


STAGES: dict[str, Fault] = {
    "launch": once(ModelRunner, "launch", RuntimeError("injected into launch")),
    "plan": once(Scheduler, "plan", RuntimeError("injected into plan")),
    "apply": once(Scheduler, "apply", RuntimeError("injected into apply")),
    "deliver": once(Recorder, "ended", RuntimeError("injected into deliver"), 2),
    "feed": once(Stream, "feed", RuntimeError("injected into feed"), 5 * AFTER),
    "wait": once(LaunchedStep, "wait", RuntimeError("injected into wait")),
    "sample": once(SamplingStage, "launch", RuntimeError("injected into sample")),
    "compile": once(Compiler, "compile", RuntimeError("injected into compile"), 0),
    "tokenize": once(Tokenizer, "encode_async", RuntimeError("injected into tokenize"), 0),
    "disk": once(app.batch.store.Disk, "add_file", OSError(errno.ENOSPC, "No space left on device"), 0),
    "fds": limit_files,
}

FAULTS: dict[str, Fault] = {
    **STAGES,
    "launch hangs": hang_launch,
    "the watchdog is off": wrapped(Engine, "hang", _ignore_call),
    "rejections raise": wrapped(RequestError, "__init__", _always_raise),
    "aborts are lost": wrapped(Engine, "abort", _ignore_call),
    "a token is skipped": wrapped(Stream, "feed", _skip_token),
    "a lock leaks": wrapped(RadixTree, "lock", _lock_twice),
    "preemption loses a token": wrapped(Request, "move", _lose_token),
    "the queue is unbounded": wrapped(Waiting, "check_room", _ignore_call),
    "the drain does not wait": wrapped(Server, "_drain", _skip_drain),
    "step failures are lost": wrapped(LocalExecutor, "results", _drop_failures),
    "bodies are decoded on the loop": wrapped(app.http.body, "_arrived", _decode_on_loop),
    "congestion is ignored": wrapped(EventStream, "_send", _ignore_congestion),
    "the sandbox is off": disable_sandbox,
    "the compiler raises": wrapped(Compiler, "compile", _always_raise),
    "HTTP errors raise": wrapped(Connection, "handle_error", _always_raise),
    "requests leak memory": wrapped(Engine, "add", _leak_memory),
}
