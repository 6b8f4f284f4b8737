"""Request bodies: bytes to a Struct, and every way that can fail to a 4xx naming the field."""

from __future__ import annotations

import asyncio
import re
from typing import TypeVar

import msgspec
from aiohttp import web

from app.errors import HttpError
from app.http.keys import SERVE
from app.http.warning import warn_of_near_fields
from core.errors import BodyTooLarge, RequestError

T = TypeVar("T")

BODY_SECONDS = 120.0
"""How long a body may take to arrive: 8 MiB at 0.6 Mbit/s. A slower client holds a connection only."""

MAX_DEPTH = 64
"""Nesting of values that we pass on (tools, template arguments). Deeper ones exhaust the stack of
whoever walks them next; the deepest real tool schema seen has 20 levels."""

MAX_WIDTH = 100_000
"""Values on one level of such a value. Each is looked at on the loop, at about 0.5 µs: 3 million in
a body of 14 MB stopped every stream for 1.3 s. The longest real conversations have some 10,000."""

_PATH = re.compile(r" - at `\$\.?(.*)`$")


async def read_body(request: web.Request) -> bytes:
    """The raw body. Raises `BodyTooLarge` before reading a body that says it is, `HttpError` 415
    for a compressed one, which is not touched, and 408 when it does not arrive."""
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    coding = request.headers.get("Transfer-Encoding", "chunked").strip().lower()
    if encoding not in ("identity", "") or coding != "chunked":
        raise HttpError(415, "Compressed request bodies are not accepted; send the JSON as it is.")
    limit = request.app[SERVE].max_body
    if request.content_length is not None and request.content_length > limit:
        raise _too_large(limit)
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise _too_large(limit) from None
    except TimeoutError:
        raise HttpError(408, "The request body did not arrive in time.") from None
    except web.RequestPayloadError:
        raise HttpError(400, "The request body is cut short or badly framed.") from None


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"The request body is larger than {limit} bytes, the most this server takes.")


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """The body as a Struct, or `RequestError` with the JSON path of what is wrong.

    On the loop, whatever the size: msgspec holds the GIL, so a thread would gain nothing. 1 MiB took
    0.3 ms (text), 1.5 ms (chat) and 5 ms (token ids).
    """
    if not body:
        raise RequestError("The request body is empty; send a JSON object.")
    try:
        decoded = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except msgspec.DecodeError as error:
        raise RequestError(f"The request body is not valid JSON: {_reason(str(error))}.") from None
    except UnicodeDecodeError:
        raise RequestError("The request body is not valid UTF-8.") from None
    except RecursionError:
        raise RequestError("The request body is nested too deeply.") from None
    warn_of_near_fields(decoder.type, body)
    return decoded


def _reason(message: str) -> str:
    return message.removeprefix("JSON is malformed: ").replace(
        "Input data was truncated", "it ends too early"
    )


def _invalid(message: str) -> RequestError:
    found = _PATH.search(message)
    if found is None:
        return RequestError(f"The request body must be a JSON object: {message}.")
    param = found.group(1).replace("[...]", "")
    what = message[: found.start()].replace("`", "").replace(" | null", "")
    if what.startswith("Expected"):
        what = what[0].lower() + what[1:]
    return RequestError(f"Invalid value for '{param}': {what}.", param or None)


def check_depth(value: object, param: str) -> None:
    """Raise `RequestError` when lists and objects inside `value` nest deeper than `MAX_DEPTH`, or
    have more than `MAX_WIDTH` values on one level."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        below: list[object] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
            if len(below) > MAX_WIDTH:
                raise RequestError(f"'{param}' has more than {MAX_WIDTH} values on one level.", param)
        if not below:
            return
        level = below
    raise RequestError(f"'{param}' is nested deeper than {MAX_DEPTH} levels.", param)
