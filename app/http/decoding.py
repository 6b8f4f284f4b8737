"""JSON to a Struct; whatever is wrong becomes a `RequestError` that names the field.

Imports nothing of HTTP: the helper process uses it too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from app.text.numbers import MAX_SLOW, slow_numbers
from core.errors import RequestError

T = TypeVar("T")

_PATH = re.compile(r" - at `\$\.?(.*)`$")
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


def check_numbers(body: bytes) -> None:
    """Raise `RequestError` for more than `MAX_SLOW` numbers that are slow to parse. Takes some 10 ns per byte
    of text that looks like numbers."""
    if slow_numbers(body) > MAX_SLOW and slow_numbers(_STRING.sub(b'""', body)) > MAX_SLOW:
        raise RequestError(
            f"The request body has more than {MAX_SLOW:,} numbers with exponents of three digits; "
            "write numbers this small as 0."
        )


def decode_json(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """The body as a Struct. Raises `RequestError` with the JSON path of the error."""
    if not body:
        raise RequestError("The request body is empty; send a JSON object.")
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except msgspec.DecodeError as error:
        raise RequestError(f"The request body is not valid JSON: {_reason(str(error))}.") from None
    except UnicodeDecodeError:
        raise RequestError("The request body is not valid UTF-8.") from None
    except RecursionError:
        raise RequestError("The request body is nested too deeply.") from None


def converted(fields: Mapping[str, Any], kind: type[T]) -> T:
    """The same for a body that is Python's own values already."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None


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
