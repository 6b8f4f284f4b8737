"""Errors as HTTP answers: one table of statuses, one shape of body per API.

The nested shape `{"error": {"message", "type", "param", "code"}}` is what clients of the OpenAI API read;
flat bodies crash some of them and are silently ignored by others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from core.errors import (
    BodyTooLarge,
    DiskFull,
    EngineFailed,
    LoomError,
    NotFound,
    Overloaded,
    RequestError,
    TimedOut,
    Unavailable,
)

RETRY_AFTER = 1.0
"""Seconds until a retry, where the error itself has no better figure (guessed)."""

THREAD_UNSUPPORTED = "thread_unsupported_request"
"""Anthropic's code for a server without conversation state: its clients continue without."""


class HttpError(LoomError):
    """An error of HTTP itself: no such route, a wrong key, a body that cannot be read."""

    def __init__(
        self, status: int, message: str, code: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.headers = headers or {}


class ErrorFields(msgspec.Struct, frozen=True):
    """The fields of `Error`."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct, frozen=True):
    """OpenAI's nested shape."""

    error: ErrorFields


class AnthropicErrorFields(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields of `AnthropicError`. Clients look at `type`."""

    type: str
    message: str
    details: dict[str, Any] | None = None


class AnthropicError(msgspec.Struct, frozen=True, tag="error"):
    """Anthropic's shape."""

    error: AnthropicErrorFields
    request_id: str


class CohereError(msgspec.Struct, frozen=True):
    """Cohere's: the message and the request's id."""

    message: str
    id: str


class OllamaError(msgspec.Struct, frozen=True):
    """Ollama's: the message alone."""

    error: str


ErrorShape = type[Error] | type[AnthropicError] | type[CohereError] | type[OllamaError]
ERRORS: tuple[ErrorShape, ...] = (Error, AnthropicError, CohereError, OllamaError)


class Fault(msgspec.Struct, frozen=True):
    """An error as a client sees it."""

    status: int
    type: str
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = {}

    def body(self, shape: ErrorShape = Error, request_id: str = "") -> bytes:
        """JSON in one of the shapes of `ERRORS`."""
        if shape is OllamaError:
            return msgspec.json.encode(OllamaError(self.message))
        if shape is CohereError:
            return msgspec.json.encode(CohereError(self.message, request_id))
        if shape is Error:
            return msgspec.json.encode(Error(ErrorFields(self.message, self.type, self.param, self.code)))
        kind = _ANTHROPIC.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        thread = {"error_code": self.code, "unsupported": ["thread"]}
        details = thread if self.code == THREAD_UNSUPPORTED else None
        fields = AnthropicErrorFields(kind, self.message, details)
        return msgspec.json.encode(AnthropicError(fields, request_id))


class _Row(msgspec.Struct, frozen=True):
    kind: type[LoomError]
    status: int
    type: str
    code: str | None = None


_TABLE = (  # the first match wins: subclasses come first
    _Row(BodyTooLarge, 413, "invalid_request_error", "request_too_large"),
    _Row(NotFound, 404, "invalid_request_error", "not_found"),
    _Row(RequestError, 400, "invalid_request_error"),
    _Row(Overloaded, 429, "rate_limit_error", "rate_limit_exceeded"),
    _Row(TimedOut, 408, "timeout_error", "request_timeout"),
    _Row(Unavailable, 503, "service_unavailable_error", "service_unavailable"),
    _Row(DiskFull, 507, "server_error", "disk_full"),
    _Row(EngineFailed, 500, "server_error", "engine_failed"),
)

_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}

_INTERNAL = Fault(
    500,
    "server_error",
    "The server had an error while processing your request.",
    headers={"x-should-retry": "false"},
)


def fault(error: BaseException) -> Fault:
    """The answer for an exception; 500 without details for all but our own."""
    if isinstance(error, HttpError):
        kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
        return Fault(error.status, kind, error.message, None, error.code, error.headers)
    for row in _TABLE:
        if isinstance(error, row.kind):
            param, code = None, row.code
            if isinstance(error, RequestError):
                param, code = error.param, error.code or row.code
            return Fault(row.status, row.type, str(error), param, code, _headers(row.status, error))
    return _INTERNAL


def _headers(status: int, error: BaseException) -> Mapping[str, str]:
    if status in (429, 503):
        seconds = error.retry_after if isinstance(error, Overloaded) else RETRY_AFTER
        return {"retry-after-ms": str(math.ceil(seconds * 1000)), "Retry-After": str(math.ceil(seconds))}
    # The request would fail again; clients retry a 408 and a 500 twice by default.
    return {"x-should-retry": "false"} if status in (408, 500) else {}
