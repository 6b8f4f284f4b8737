"""Every error the program raises on purpose.

    LoomError
    ├── ConfigError          the operator must change something; exit code 2 at start
    │   └── ModelError       the checkpoint, its tokenizer or its format
    ├── RequestError         one request is wrong; names the field
    │   ├── ContextExceeded  the prompt (and what it asks for) does not fit
    │   ├── NotFound         a model, request or route that is not here
    │   ├── Aborted          somebody ended it before it had an answer
    │   └── BodyTooLarge     more bytes than the server takes
    ├── Overloaded           refused now, may be sent again
    ├── TimedOut             it took longer than its client allows
    ├── Unavailable          starting, draining or failed
    ├── DiskFull             what was to be kept has no room
    └── EngineFailed         a step raised; its requests end with this

HTTP status codes live in `app/http/errors.py`.
"""

from __future__ import annotations

import errno
import sqlite3


class LoomError(Exception):
    """Root of the tree."""


class ConfigError(LoomError):
    """A flag, file or machine is wrong. The message says what to change."""


class ModelError(ConfigError):
    """A checkpoint cannot be read or served."""


class RequestError(LoomError):
    """A request that can never succeed as sent.

    `param` is the JSON path of the offending field (`messages[0].content`), or None when the body
    as a whole is wrong; `code` is the machine-readable OpenAI code, or None.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


def field_error(param: str, what: str, code: str | None = None) -> RequestError:
    """A `RequestError` whose message is the field's name and `what` is wrong with it."""
    return RequestError(f"'{param}' {what}.", param, code)


def unsupported(param: str, reason: str, beside: str = "") -> RequestError:
    """The error for a field that this server cannot honour, or not together with the field `beside`."""
    together = f" with '{beside}'" if beside else ""
    return field_error(param, f"is not supported{together}: {reason}", "unsupported")


class ContextExceeded(RequestError):
    """The prompt plus the requested output is longer than the model's context. `counted` False: the prompt
    has at least so many tokens."""

    def __init__(
        self, limit: int, prompt: int, output: int, param: str = "messages", counted: bool = True
    ) -> None:
        self.limit = limit
        self.prompt = prompt
        asked = f"{prompt} in the prompt" + (f" and {output} for the completion" if output else "")
        total = f"{'' if counted else 'at least '}{prompt + output}"
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{total} tokens ({asked}). Shorten the prompt or lower max_tokens.",
            param,
            "context_length_exceeded",
        )


class NotFound(RequestError):
    """There is nothing of that name."""


class Aborted(RequestError):
    """The request was aborted by its id, so there is no complete answer."""

    def __init__(self) -> None:
        super().__init__("The request was aborted.", code="request_aborted")


class BodyTooLarge(RequestError):
    """The request body passes the server's limit."""


class Overloaded(LoomError):
    """The waiting queue is full; `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TimedOut(LoomError):
    """A request did not end within its own `timeout`."""


class Unavailable(LoomError):
    """The server is starting, draining or failed."""


class DiskFull(LoomError):
    """There is no room on the disk for the data to be stored."""


def check_disk_full(error: Exception) -> None:
    """Raise `DiskFull` if `error` is how the system or sqlite reports a full disk or quota."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if full or getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        raise DiskFull("The server's disk is full; its operator has to make room on it.") from error


class EngineFailed(LoomError):
    """A step did not complete."""
