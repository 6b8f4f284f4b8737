"""The JSONL of batches: input lines and output lines."""

from __future__ import annotations

import codecs
import re
import secrets
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec
import numpy as np

from app.batch.records import BatchError
from app.http.errors import fault
from app.http.reply import encode_long
from app.text.numbers import MAX_SLOW, slow_numbers

MAX_LINES = 50_000
"""Requests in one batch: OpenAI's bound."""
MAX_LINE = 32 * 2**20
"""Bytes in one line (guessed: more than the context of any current model)."""
SLICE = 2**16
"""Bytes of a line that are processed while holding the GIL."""
MAX_ID = 512
"""Characters of a `custom_id`."""
BOM = codecs.BOM_UTF8
"""What editors on Windows put in front of a file."""
LINES_PER_SLICE, PAUSE = 16, 5e-5
"""Lines between two pauses, and their length in seconds: without them, a thread that reads 50,000 lines holds
the GIL for 5 ms at a time, which delays steps."""
MAX_ERRORS = 100
"""Errors after which validation stops."""


class Line(msgspec.Struct, frozen=True):
    """One request. `body` is the JSON of what would be posted to `url`."""

    number: int
    custom_id: str
    url: str
    body: bytes


class BadLine(Exception):
    """A line that is not a valid request; `error` says why."""

    def __init__(self, error: BatchError) -> None:
        super().__init__(error.message)
        self.error = error


class _Raw(msgspec.Struct):
    custom_id: str | None = None
    method: str | None = None
    url: str | None = None
    body: msgspec.Raw = msgspec.Raw()


_BREAKS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))
"""U+0085, U+2028 and U+2029 are valid in JSON, but Python's `str.splitlines`, which people read results with,
ends a line at each."""

_decode = msgspec.json.Decoder(_Raw).decode

_MARK = re.compile(rb'["{}\[\]]')
_STEPS = np.zeros(256, np.int8)
"""Change of the nesting depth by a byte outside of strings."""
_STEPS[list(b"{[")], _STEPS[list(b"}]")] = 1, -1
_PLACE = b'{"' + secrets.token_hex(16).encode() + b'":%d}'
"""Placeholder for a long value while the rest of the line is decoded."""


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, bytes) of every line that is not blank. A line that is too long is cut to one byte more
    than allowed. Blocks."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE + 1):
            number += 1
            while not line.endswith(b"\n") and len(line) > MAX_LINE and (rest := file.readline(MAX_LINE)):
                if rest.endswith(b"\n"):
                    break
            if number == 1:
                line = line.removeprefix(BOM)
            if line.strip():
                yield number, line
            if number % LINES_PER_SLICE == 0:
                time.sleep(PAUSE)


def parse_line(number: int, text: bytes, endpoints: Collection[str]) -> Line:
    """The request of a line. Raises `BadLine` for errors for which OpenAI rejects a whole batch; the body
    itself is checked when it runs."""
    raw = _read(number, text)
    if not raw.custom_id or len(raw.custom_id) > MAX_ID:
        message = f"'custom_id' must be a string of 1 to {MAX_ID} characters."
        raise bad(number, "invalid_custom_id", message, "custom_id")
    if (raw.method or "POST").upper() != "POST":
        raise bad(number, "invalid_method", "'method' must be 'POST'.", "method")
    if raw.url is None or raw.url not in endpoints:
        listed = " or ".join(sorted(endpoints))
        raise bad(number, "invalid_url", f"'url' must be {listed}.", "url")
    body = bytes(raw.body)
    if not body.startswith(b"{"):
        raise bad(number, "invalid_body", "'body' must be an object.", "body")
    return Line(number, raw.custom_id, raw.url, body)


def _read(number: int, text: bytes) -> _Raw:
    """Check size and numbers, then decode."""
    if len(text) > MAX_LINE:
        raise bad(number, "line_too_long", f"The line is longer than {MAX_LINE} bytes.")
    if sum(slow_numbers(text[at : at + SLICE]) for at in range(0, len(text), SLICE)) > MAX_SLOW:
        raise bad(number, "slow_numbers", f"More than {MAX_SLOW:,} numbers have exponents of three digits.")
    short, values = shortened(text.strip())
    try:
        raw = _decode(short)
        for i, value in enumerate(values):
            if raw.body == msgspec.Raw(_PLACE % i):
                raw.body = msgspec.Raw(value)
        return raw
    except msgspec.ValidationError as error:
        raise bad(number, "invalid_line", f"The line is no batch request: {error}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad(number, "invalid_json_line", f"The line is not valid JSON: {error}.") from None


def shortened(text: bytes) -> tuple[bytes, list[bytes]]:
    """A JSON object with `_PLACE` for each value longer than `SLICE`, and those values: msgspec holds the GIL
    while it decodes, 9 to 51 ms for 10 MB. In long values only brackets and strings are looked at here;
    whether they are valid JSON is checked when the line runs."""
    if len(text) <= SLICE:
        return text, []
    parts: list[bytes] = []
    values: list[bytes] = []
    copied = 0
    for start, end in _long_values(text):
        if text[start] == ord('"'):  # no field may be so long: this one is rejected, or unknown and ignored
            parts += (text[copied:start], b'"%b"' % (b"x" * (MAX_ID + 1)))
        else:
            parts += (text[copied:start], _PLACE % len(values))
            values.append(text[start:end])
        copied = end
    return b"".join((*parts, text[copied:])), values


def _long_values(text: bytes) -> Iterator[tuple[int, int]]:
    """(start, end) of each string, list and object directly inside an object that is longer than `SLICE`."""
    depth = start = at = slice_end = 0
    while at < len(text):
        if at >= slice_end:
            slice_end = at + SLICE
            if (inner := _depth_behind(depth, text[at:slice_end])) is not None:
                depth, at = inner, slice_end
                continue
        found = _MARK.search(text, at, slice_end)
        if found is None:
            at = slice_end
            continue
        first, mark = found.start(), found.group()
        at = _string_end(text, first + 1) if mark == b'"' else first + 1
        if mark in b"{[":
            start = first if depth == 1 else start
            depth += 1
            continue
        depth -= mark != b'"'
        begun = first if mark == b'"' else start
        if depth == 1 and at - begun > SLICE:
            yield begun, at


def _depth_behind(depth: int, chunk: bytes) -> int | None:
    """The nesting depth after a chunk that lies within one value and has no strings, else None."""
    if b'"' in chunk:
        return None
    depths = depth + np.cumsum(_STEPS[np.frombuffer(chunk, np.uint8)], dtype=np.int32)
    return int(depths[-1]) if depths.min() > 1 else None


def _string_end(text: bytes, at: int) -> int:
    """The position after the closing quote of the string whose characters begin at `at`."""
    while (end := text.find(b'"', at)) >= 0:
        escapes = end
        while escapes > at and text[escapes - 1] == ord("\\"):
            escapes -= 1
        if (end - escapes) % 2 == 0:
            return end + 1
        at = end + 1
    return len(text)


def bad(number: int, code: str, message: str, param: str | None = None) -> BadLine:
    """The exception for line `number`."""
    return BadLine(BatchError(code=code, message=message, line=number, param=param))


def check_input(path: Path, endpoint: str) -> tuple[int, list[BatchError]]:
    """The number of requests in a file and its errors, up to `MAX_ERRORS`. Blocks."""
    errors: list[BatchError] = []
    seen: set[str] = set()
    for number, text in read_lines(path):
        if len(seen) == MAX_LINES:
            errors.append(BatchError(code="too_many_lines", message=f"At most {MAX_LINES} requests fit."))
        if len(errors) >= MAX_ERRORS or len(seen) == MAX_LINES:
            break
        try:
            line = parse_line(number, text, (endpoint,))
        except BadLine as wrong:
            errors.append(wrong.error)
            continue
        if line.custom_id in seen:
            message = f"The custom_id {line.custom_id[:100]!r} was used before."
            errors.append(bad(number, "duplicate_custom_id", message, "custom_id").error)
        seen.add(line.custom_id)
    if not seen and not errors:
        errors.append(BatchError(code="empty_file", message="The input file has no requests."))
    return len(seen), errors


def answered(custom_id: str, status: int, body: object) -> bytes:
    """The output line of a request that got an answer."""
    response = {"status_code": status, "request_id": f"req_{secrets.token_hex(12)}", "body": body}
    return _record(custom_id, response, None)


def failed(custom_id: str, error: BaseException) -> bytes:
    """The output line of a request that failed, with the answer HTTP would give."""
    answer = fault(error)
    return answered(custom_id, answer.status, msgspec.Raw(answer.body()))


def unanswered(custom_id: str, code: str, message: str) -> bytes:
    """The output line of a request that never ran."""
    return _record(custom_id, None, {"code": code, "message": message})


def _record(custom_id: str, response: object, error: object) -> bytes:
    id = f"batch_req_{secrets.token_hex(12)}"
    text = encode_long({"id": id, "custom_id": custom_id, "response": response, "error": error})
    for raw, escaped in _BREAKS:
        text = text.replace(raw, escaped)
    return text + b"\n"
