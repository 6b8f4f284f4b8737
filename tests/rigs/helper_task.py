"""A task for the helper process."""

from __future__ import annotations

import os
import signal

from core.helper import Task


class Work:
    """Acts on its payload, in the helper process."""

    def __init__(self, state: bytes) -> None:
        self._state = state

    def __call__(self, payload: bytes) -> bytes:
        match payload:
            case b"pid":
                return b"%d" % os.getpid()
            case b"for ever":
                while True:
                    pass
            case b"memory":
                return bytes(2**33)
            case b"die":
                os.kill(os.getpid(), signal.SIGSEGV)
            case b"raise":
                raise ValueError("no")
        return self._state + payload


TASK = Task(f"{__name__}:Work", b"state ")
