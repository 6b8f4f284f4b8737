"""A fault while an answer is read, as its client is told."""

from __future__ import annotations

from core.errors import EngineFailed, LoomError, RequestError, Unavailable
from core.grammar import BROKEN
from core.types import Finish, FinishReason

UNREADABLE = "The server could not read the model's answer."
"""What a parser's fault becomes, wherever it shows."""


def failure(finish: Finish) -> LoomError | None:
    """The error in a request's end, None for an end that the client asked for or expected."""
    if finish.message is not None and finish.message.startswith(BROKEN):
        return RequestError(finish.message, code="constraint_failed")
    if finish.reason is FinishReason.ERROR:
        return EngineFailed(finish.message or "The engine failed while processing your request.")
    if finish.message is not None:
        return Unavailable(finish.message)
    return None
