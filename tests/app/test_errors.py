"""Errors that clients are told when a request ends."""

from __future__ import annotations

from app.engine.failure import failure
from app.http.errors import fault
from core.grammar import BROKEN
from core.types import Finish, FinishReason


def test_a_broken_matcher_is_its_own_requests_error_with_the_reason() -> None:
    error = failure(Finish(FinishReason.ERROR, message=f"{BROKEN}: too many items."))
    assert error is not None
    seen = fault(error)
    assert (seen.status, seen.type, seen.code) == (400, "invalid_request_error", "constraint_failed")
    assert seen.message.endswith("too many items.")


def test_an_engines_failure_is_the_servers() -> None:
    error = failure(Finish(FinishReason.ERROR, message="The step failed."))
    assert error is not None and fault(error).status == 500
    assert failure(Finish(FinishReason.STOP)) is None
