"""The error that a client gets for a request that failed."""

from __future__ import annotations

from core.errors import EngineFailed, LoomError, RequestError, TimedOut, Unavailable
from core.grammar import BROKEN
from core.types import Finish, FinishReason

UNREADABLE = "The server could not read the model's answer."
"""The message for a fault of a parser."""

TIMED_OUT = "The request took longer than its 'timeout'."
"""The message of the end of such a request."""


def failure(finish: Finish) -> LoomError | None:
    """The error in how a request finished, None for a regular finish or the client's own abort."""
    if finish.message is not None and finish.message.startswith(BROKEN):
        return RequestError(finish.message, code="constraint_failed")
    if finish.reason is FinishReason.ERROR:
        return EngineFailed(finish.message or "The engine failed while processing your request.")
    if finish.message == TIMED_OUT:
        return TimedOut(TIMED_OUT)
    if finish.message is not None:
        return Unavailable(finish.message)
    return None
