"""What a client should know of a request that was taken all the same: the header `x-loom-warning`."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, get_args

import msgspec

HEADER = "X-Loom-Warning"

MAX_WARNINGS = 8
MAX_CHARS = 300
"""Of one. Clients and proxies take headers of 8 KB altogether."""

MAX_BODY = 32 * 1024
"""Bytes of a body whose fields are looked at: it is decoded once more, on the loop."""
MAX_NAME = 64
MAX_UNKNOWN = 8
"""Unknown fields of one object that are compared with the known ones, at some 0.1 ms each the first time."""
ALIKE = 0.8
"""Similarity (difflib's ratio) from which a name is taken for a misspelt field: `max_new_tokens` has 0.83 of
`max_tokens`."""

_said: ContextVar[list[str] | None] = ContextVar("warnings", default=None)


def warn(text: str) -> None:
    """Tell the client of the request at hand, once for equal texts. Nobody is told where there is no request
    (a line of a batch, `app.offline`), or when its answer has begun."""
    said = _said.get()
    if said is not None and text not in said and len(said) < MAX_WARNINGS:
        said.append(text)


@contextmanager
def warnings() -> Iterator[list[str]]:
    """The warnings of one request, as they come."""
    said: list[str] = []
    token = _said.set(said)
    try:
        yield said
    finally:
        _said.reset(token)


def header_value(said: list[str]) -> str:
    """All of them on one line of printable ASCII: they may quote what a client sent."""
    return "; ".join(text.encode("unicode_escape").decode("ascii")[:MAX_CHARS] for text in said)


def warn_of_near_fields(kind: Any, body: bytes) -> None:
    """Warn of fields that `kind`, a Struct, does not know but nearly does: they are passed over, as unknown
    fields are, and the client believes in them. `body` is JSON that was decoded as `kind` before."""
    if _said.get() is None or len(body) > MAX_BODY:
        return
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        # The decoder of a Struct does not look at what it passes over: a name may be no text at all.
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            _warn_of_near(kind, msgspec.Raw(body), "")


def _warn_of_near(kind: type[msgspec.Struct], body: msgspec.Raw, prefix: str) -> None:
    fields = _decode(body)
    known = _known(kind)
    unknown = [name for name in fields if name not in known]
    for name in unknown[:MAX_UNKNOWN]:
        if len(name) <= MAX_NAME and (meant := _nearest(kind, name)) is not None:
            warn(f"'{prefix}{name}' is ignored: no field has that name; did you mean '{prefix}{meant}'?")
    for name, inner in known.items():
        if inner is not None and bytes(fields.get(name, b""))[:1] == b"{":
            _warn_of_near(inner, fields[name], f"{prefix}{name}.")


@lru_cache
def _known(kind: type[msgspec.Struct]) -> Mapping[str, type[msgspec.Struct] | None]:
    """Fields by name; the Struct that a field is, if it is one."""
    found: dict[str, type[msgspec.Struct] | None] = {}
    for field in msgspec.structs.fields(kind):
        kinds = get_args(field.type) or (field.type,)
        structs = [each for each in kinds if isinstance(each, type) and issubclass(each, msgspec.Struct)]
        found[field.encode_name] = structs[0] if len(structs) == 1 else None
    return found


@lru_cache(1024)
def _nearest(kind: type[msgspec.Struct], name: str) -> str | None:
    spelt = {_plain(field): field for field in _known(kind)}
    near = difflib.get_close_matches(_plain(name), spelt, 1, ALIKE)
    return spelt[near[0]] if near else None


def _plain(name: str) -> str:
    """`maxTokens` and `max-tokens` are how others write `max_tokens`."""
    return name.lower().replace("-", "").replace("_", "")


_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
