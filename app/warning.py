"""Warnings about requests that are served nevertheless: the header `x-loom-warning`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from contextlib import suppress
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, get_args

import msgspec

from app.context import holding

HEADER = "X-Loom-Warning"

MAX_WARNINGS = 8
MAX_CHARS = 300
"""Characters of one warning. Clients and proxies accept headers of 8 KB in all."""

MAX_BODY = 32 * 1024
"""Bytes up to which a body's fields are checked: it is decoded once more, on the loop."""
MAX_NAME = 64
MAX_UNKNOWN = 8
"""Unknown fields of one object that are compared with known ones, at 0.1 ms each the first time."""
ALIKE = 0.8
"""Similarity (difflib's ratio) from which a name counts as a misspelt field: `max_new_tokens` and
`max_tokens` have 0.83."""

_warnings: ContextVar[list[str] | None] = ContextVar("warnings", default=None)


def warn(text: str) -> None:
    """Warn the client of the current request, once for equal texts. No effect where there is no request (a
    line of a batch, `app.offline`), or after its answer has begun."""
    texts = _warnings.get()
    if texts is not None and text not in texts and len(texts) < MAX_WARNINGS:
        texts.append(text)


def warnings() -> holding[list[str]]:
    """Collect the warnings of one request."""
    return holding(_warnings, [])


def header_value(texts: list[str]) -> str:
    """All warnings as one line of printable ASCII: they may quote what a client sent."""
    return "; ".join(text.encode("unicode_escape").decode("ascii")[:MAX_CHARS] for text in texts)


def warn_of_near_fields(kind: Any, body: bytes) -> None:
    """Warn of unknown fields whose names are close to those of `kind`, a Struct: they are ignored, which the
    client may not notice. `body` is JSON that was decoded as `kind` before."""
    if _warnings.get() is None or len(body) > MAX_BODY:
        return
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        # The decoder of a Struct does not check what it skips: a name may be invalid text.
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            _warn_of_near(kind, msgspec.Raw(body), "")


def _warn_of_near(kind: type[msgspec.Struct], body: msgspec.Raw, prefix: str) -> None:
    fields = _decode(body)
    known, inner = _known(kind)
    if not fields.keys() <= known:
        unknown = [name for name in fields if name not in known]
        for name in unknown[:MAX_UNKNOWN]:
            if len(name) <= MAX_NAME and (meant := _nearest(kind, name)) is not None:
                warn(f"'{prefix}{name}' is ignored: no field has that name; did you mean '{prefix}{meant}'?")
    for name in filter(inner.__contains__, fields):
        if bytes(fields[name])[:1] == b"{":
            _warn_of_near(inner[name], fields[name], f"{prefix}{name}.")


@lru_cache
def _known(kind: type[msgspec.Struct]) -> tuple[frozenset[str], Mapping[str, type[msgspec.Struct]]]:
    """Names of the fields, and the Structs of those that are one."""
    inner: dict[str, type[msgspec.Struct]] = {}
    fields = msgspec.structs.fields(kind)
    for field in fields:
        kinds = get_args(field.type) or (field.type,)
        structs = [each for each in kinds if isinstance(each, type) and issubclass(each, msgspec.Struct)]
        if len(structs) == 1:
            inner[field.encode_name] = structs[0]
    return frozenset(field.encode_name for field in fields), inner


@lru_cache(1024)
def _nearest(kind: type[msgspec.Struct], name: str) -> str | None:
    spelt = {_plain(field): field for field in _known(kind)[0]}
    near = difflib.get_close_matches(_plain(name), spelt, 1, ALIKE)
    return spelt[near[0]] if near else None


def _plain(name: str) -> str:
    """A name without case and separators: `maxTokens` and `max-tokens` are spellings of `max_tokens`."""
    return name.lower().replace("-", "").replace("_", "")


_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
