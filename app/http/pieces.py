"""Large bodies, decoded in the helper process and sent back in pieces, between which the loop is free.

A piece is 16 KB of msgpack, or one value with few parts. Limits are checked before anything is sent, so that
no piece takes the loop more than some 3 ms.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Literal, TypeVar

import msgspec

from app.http.decoding import check_numbers, decode_json
from core.errors import RequestError, field_error

T = TypeVar("T")

PIECE = 16 * 1024
"""Bytes of a piece, where its value can be split."""
NUMBERS = 4_096
"""Numbers of a list in one piece: at most 9 bytes each."""
MAX_NUMBERS = 262_144
"""Numbers in one list: the longest context of a supported model. Converting it to numpy takes 3 to 4 ms."""
MAX_ITEMS = 32_768
"""Items in one list of anything else. The longest real conversations have some 10,000 messages. A copy of
32,768 takes 2 ms to free, without a switch to another thread."""
FREED = 1_024
"""Items of a list that are freed in one turn of the loop: some 0.3 ms."""
MAX_VALUES = 20_000
"""Values in one item of a list, or a field that is no list: the largest schemas in use have some 10,000."""

Kind = Literal["value", "raw", "text", "items", "open", "numbers"]
"""How a piece is used: set the field; set it to raw JSON; append text; append items to a list; begin a list
inside the list; append numbers to that inner list, or to the field if there is none."""


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A part of a field."""

    field: str
    kind: Kind
    data: memoryview


class Decoded(msgspec.Struct, frozen=True, array_like=True):
    """The helper process' answer: pieces, or the fields of a `RequestError`."""

    pieces: list[Piece] = []
    wrong: str = ""
    param: str | None = None


class BodyWorker:
    """A `core.helper.Worker` that decodes bodies to one Struct, which its state names."""

    def __init__(self, state: bytes) -> None:
        module, _, name = state.decode().partition(":")
        self._decoder = msgspec.json.Decoder(getattr(importlib.import_module(module), name))

    def __call__(self, payload: bytes) -> bytes:
        """A `Decoded` in msgpack."""
        try:
            check_numbers(payload)
            return _encode(Decoded(list(_pieces(decode_json(self._decoder, payload)))))
        except RequestError as error:
            return _encode(Decoded(wrong=error.message, param=error.param))
        except OverflowError:
            return _encode(Decoded(wrong="The request body has a whole number of more than 64 bits."))


_encode = msgspec.msgpack.Encoder().encode


def _piece(field: str, kind: Kind, data: bytes) -> Piece:
    return Piece(field, kind, memoryview(data))


def _pieces(body: Any) -> Iterator[Piece]:
    for field in msgspec.structs.fields(body):
        name, value = field.name, getattr(body, field.name)
        if value is field.default:
            continue
        if isinstance(value, msgspec.Raw):
            yield _piece(name, "raw", bytes(value))
        elif isinstance(value, str):
            for at in range(0, len(value) or 1, PIECE):
                yield _piece(name, "text", value[at : at + PIECE].encode())
        elif isinstance(value, list) and value:
            listed = _numbers if _numeric(value) else _items
            yield from listed(name, field.encode_name, value)
        else:
            _check_values(value, field.encode_name)
            yield _piece(name, "value", _encode(value))


def _numeric(value: object) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int, float}


def _numbers(name: str, param: str, numbers: list[Any]) -> Iterator[Piece]:
    if len(numbers) > MAX_NUMBERS:
        raise field_error(param, f"takes at most {MAX_NUMBERS:,} numbers, got {len(numbers):,}")
    for at in range(0, len(numbers), NUMBERS):
        yield _piece(name, "numbers", _encode(numbers[at : at + NUMBERS]))


def _items(name: str, param: str, items: list[Any]) -> Iterator[Piece]:
    if len(items) > MAX_ITEMS:
        raise field_error(param, f"takes at most {MAX_ITEMS:,} items, got {len(items):,}")
    begun = size = 0
    for i, item in enumerate(items):
        numeric = _numeric(item)
        long = numeric and len(item) > NUMBERS
        if not long:
            if not numeric:
                _check_values(item, f"{param}[{i}]")
            size += len(_encode(item))
        if size > PIECE or long:
            if begun < i:
                yield _piece(name, "items", _encode(items[begun:i]))
            begun, size = i, size if begun == i else 0
        if long:
            yield _piece(name, "open", b"")
            yield from _numbers(name, f"{param}[{i}]", item)
            begun, size = i + 1, 0
    if begun < len(items):
        yield _piece(name, "items", _encode(items[begun:]))


def _check_values(value: object, param: str) -> None:
    """Raise `RequestError` for more than `MAX_VALUES` values, nested ones included."""
    count, ahead = 0, [value]
    while ahead:
        one = ahead.pop()
        if isinstance(one, msgspec.Struct):
            one = msgspec.structs.asdict(one)
        inner = one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        count += len(inner)
        if count > MAX_VALUES:
            raise field_error(param, f"has more than {MAX_VALUES:,} values")
        ahead += inner


# -- the loop's side -------------------------------------------------------------------------------


async def assembled(kind: type[T], data: bytes) -> T:
    """The Struct that `BodyWorker` decoded. Raises its `RequestError`."""
    decoded = msgspec.msgpack.decode(data, type=Decoded)  # pieces are views of `data`
    if decoded.wrong:
        raise RequestError(decoded.wrong, decoded.param)
    fields: dict[str, Any] = {}
    texts: dict[str, list[str]] = {}
    loop = asyncio.get_running_loop()
    for piece in decoded.pieces:
        if piece.kind == "text":
            texts.setdefault(piece.field, []).append(str(piece.data, "utf-8"))
        else:
            if piece.kind == "items":
                fields.setdefault(piece.field, _Items(loop))
            _add(fields, piece, kind)
        await asyncio.sleep(0)
    return kind(**fields, **{name: "".join(parts) for name, parts in texts.items()})


class _Items(list[Any]):
    """Items of a body, freed `FREED` at a time once nobody uses the list. Freeing 20,000 messages with parts
    at once holds the GIL for 5.6 ms, in whatever thread drops them."""

    __slots__ = ("_loop",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop

    def __del__(self) -> None:
        if len(self) > FREED and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_free, list(self), self._loop)


def _free(items: list[Any], loop: asyncio.AbstractEventLoop) -> None:
    del items[-FREED:]
    if items:
        loop.call_soon(_free, items, loop)


def _add(fields: dict[str, Any], piece: Piece, kind: Any) -> None:
    match piece.kind:
        case "value":
            fields[piece.field] = _decoder(kind, piece.field).decode(piece.data)
        case "raw":
            fields[piece.field] = msgspec.Raw(bytes(piece.data))
        case "items":
            fields[piece.field].extend(_decoder(kind, piece.field).decode(piece.data))
        case "open":
            fields.setdefault(piece.field, []).append([])
        case "numbers":
            listed = fields.setdefault(piece.field, [])
            inner = listed[-1] if listed and isinstance(listed[-1], list) else listed
            inner.extend(msgspec.msgpack.decode(piece.data))


@lru_cache
def _decoder(kind: Any, name: str) -> msgspec.msgpack.Decoder[Any]:
    (found,) = (field.type for field in msgspec.structs.fields(kind) if field.name == name)
    return msgspec.msgpack.Decoder(found)
