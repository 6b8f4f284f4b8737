"""Trial compile of a costly grammar in the helper process; a pool thread compiles it again if that passes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec

from core.grammar import TokenTable
from core.helper import Task
from gpu.grammar.cache import Key
from gpu.grammar.llguidance_backend import LlguidanceBackend
from gpu.grammar.schema import Refused
from gpu.grammar.xgrammar_backend import XgrammarBackend

STACK = 4 * 2**20
"""Bytes, half of what the server's threads usually have: recursion that lives through it here does not
overflow theirs, which would end the server."""


def trial_task(table: TokenTable, tags: bool) -> Task:
    """The helper's task for structural tags, or for all other constraints, over one vocabulary. Its payload
    is the msgpack of a `Key`, its answer the refusal, empty if there is none."""
    return Task(f"{__name__}:{Trial.__name__}", msgspec.msgpack.encode((table, tags)))


class Trial:
    """Compiles a constraint to see whether it can be: `core.helper.Worker`."""

    def __init__(self, state: bytes) -> None:
        table, tags = msgspec.msgpack.decode(state, type=tuple[TokenTable, bool])
        self._backend = (XgrammarBackend if tags else LlguidanceBackend)(table, 1)
        threading.stack_size(STACK)
        self._thread = ThreadPoolExecutor(1)

    def __call__(self, payload: bytes) -> bytes:
        """The reason for a refusal; empty if it compiles."""
        return self._thread.submit(self._refusal, payload).result()

    def _refusal(self, payload: bytes) -> bytes:
        try:
            self._backend.compile(*msgspec.msgpack.decode(payload, type=Key))
        except Refused as error:
            return str(error).encode()
        return b""
