"""JSON to a Struct; whatever is wrong becomes a `RequestError` that names the field.

Imports nothing of HTTP: the helper process uses it too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, TypeVar

import msgspec

from app.text.numbers import MAX_SLOW, slow_numbers
from core.errors import RequestError

T = TypeVar("T")

MAX_NESTING = 500
"""Nesting of lists and objects in a body. Python takes 1,000, less the calls under way: a value that was just
not too deep to be read could not be passed on or written."""

_PATH = re.compile(r" - at `\$\.?(.*)`$")
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


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
        found = decoder.decode(body)
        if body.count(b"[") + body.count(b"{") > MAX_NESTING and _nesting(body) > MAX_NESTING:
            raise RecursionError
        return found
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except msgspec.DecodeError as error:
        raise RequestError(f"The request body is not valid JSON: {_reason(str(error))}.") from None
    except UnicodeDecodeError:
        raise RequestError("The request body is not valid UTF-8.") from None
    except RecursionError:
        raise RequestError(f"The request body is nested too deeply: at most {MAX_NESTING} levels.") from None


def _nesting(body: bytes) -> int:
    """How deep the lists and objects of a body that is JSON are. 8 MB of brackets take 0.5 s."""
    brackets = _STRING.sub(b"", body).translate(None, _NO_BRACKETS)
    return max(accumulate(1 if each in b"[{" else -1 for each in brackets))


def converted(fields: Mapping[str, Any], kind: type[T]) -> T:
    """Convert a body that is already decoded to Python values into a Struct. Raises as `decode_json` does."""
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
