"""Trial compile of a costly grammar in the helper process; a pool thread compiles it again if that passes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec

from core.grammar import TokenTable
from core.helper import Task
from gpu.grammar.llguidance_backend import LlgBackend
from gpu.grammar.schema import Refused
from gpu.grammar.xgrammar_backend import XgrBackend

STACK = 4 * 2**20
"""Bytes, half of what the server's threads usually have: recursion that lives through it here does not
overflow theirs, which would end the server."""


class Trials:
    """The helper's tasks for one vocabulary."""

    __slots__ = ("_rest", "_tags")

    def __init__(self, table: TokenTable) -> None:
        state = msgspec.msgpack.encode(table)
        self._tags = Task(f"{__name__}:{TagTrial.__name__}", state)
        self._rest = Task(f"{__name__}:{Trial.__name__}", state)

    def task(self, kind: str) -> Task:
        """Its payload is the msgpack of (kind, text), its answer the refusal, or nothing."""
        return self._tags if kind == "structural_tag" else self._rest


class Trial:
    """What llguidance makes of a constraint: `core.helper.Worker`."""

    def __init__(self, state: bytes) -> None:
        self._backend = self._load(msgspec.msgpack.decode(state, type=TokenTable))
        threading.stack_size(STACK)
        self._thread = ThreadPoolExecutor(1)

    def __call__(self, payload: bytes) -> bytes:
        """Why it is refused, or nothing."""
        return self._thread.submit(self._refusal, payload).result()

    def _refusal(self, payload: bytes) -> bytes:
        kind, text = msgspec.msgpack.decode(payload, type=tuple[str, str])
        try:
            self._backend.compile(kind, text)
        except Refused as error:
            return str(error).encode()
        return b""

    @staticmethod
    def _load(table: TokenTable) -> LlgBackend | XgrBackend:
        return LlgBackend(table, 1)


class TagTrial(Trial):
    """What xgrammar makes of a structural tag."""

    @staticmethod
    def _load(table: TokenTable) -> LlgBackend | XgrBackend:
        return XgrBackend(table, 1)
