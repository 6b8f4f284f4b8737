"""A decoded body in pieces that the loop reads one at a time: how it comes back from the helper process.

A piece is msgpack of 32 KB, or one value of few parts: limits are looked at before anything is sent, so that
no piece takes the loop longer than some 3 ms. In between the loop is free.
"""

from __future__ import annotations

import asyncio
import importlib
import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from app.http.decoding import check_numbers, decode_json
from core.errors import RequestError

T = TypeVar("T")

PIECE = 32 * 1024
"""Bytes of a piece, where what it holds can be cut."""
NUMBERS = 4_096
"""Of a list, in one piece: at most 9 bytes each."""
MAX_NUMBERS = 393_216
"""Of one list: three times the context of today's models. As an array of numpy's they take 4 ms."""
MAX_ITEMS = 32_768
"""Of one list that holds more than numbers. The longest real conversations have 10,000 messages. A copy of
32,768 takes 2 ms to free, which nothing interrupts."""
FREED = 1_024
"""Items of a list that are freed in one turn of the loop: some 0.3 ms."""
MAX_VALUES = 20_000
"""In one item of a list, or one field that is none: the largest schemas in use have some 10,000."""

_LENGTH = struct.Struct("<I")

Kind = Literal["value", "raw", "text", "items", "open", "numbers"]
"""What is done with a piece: set the field; set it to JSON as it came; add text; add items of a list; begin a
list inside the list; add numbers to that list, or to the field where none is open."""


class Cut(msgspec.Struct, frozen=True, array_like=True):
    """A piece of a field."""

    field: str
    kind: Kind
    size: int


class Index(msgspec.Struct, frozen=True, array_like=True):
    """What comes before the pieces: the fields of a `RequestError`, or the cuts."""

    wrong: str = ""
    param: str | None = None
    cuts: list[Cut] = []


class BodyWorker:
    """Decodes bodies of one kind in the helper process: `core.helper.Worker`. Its state names the Struct."""

    def __init__(self, state: bytes) -> None:
        module, _, name = state.decode().partition(":")
        self._decoder = msgspec.json.Decoder(getattr(importlib.import_module(module), name))

    def __call__(self, payload: bytes) -> bytes:
        """An index with its length, and the pieces."""
        try:
            check_numbers(payload)
            pieces = list(_pieces(decode_json(self._decoder, payload)))
        except RequestError as error:
            return _joined(Index(error.message, error.param), [])
        except OverflowError:
            return _joined(Index("The request body has a whole number of more than 64 bits."), [])
        cuts = [Cut(piece.field, piece.kind, len(piece.data)) for piece in pieces]
        return _joined(Index(cuts=cuts), [piece.data for piece in pieces])


class _Piece(NamedTuple):
    field: str
    kind: Kind
    data: bytes


_encode = msgspec.msgpack.Encoder().encode


def _joined(index: Index, pieces: list[bytes]) -> bytes:
    head = _encode(index)
    return b"".join((_LENGTH.pack(len(head)), head, *pieces))


def _pieces(body: Any) -> Iterator[_Piece]:
    for field in msgspec.structs.fields(body):
        name, value = field.name, getattr(body, field.name)
        if value is field.default:
            continue
        if isinstance(value, msgspec.Raw):
            yield _Piece(name, "raw", bytes(value))
        elif isinstance(value, str):
            for at in range(0, len(value) or 1, PIECE):
                yield _Piece(name, "text", value[at : at + PIECE].encode())
        elif isinstance(value, list) and value:
            listed = _numbers if _numeric(value) else _items
            yield from listed(name, field.encode_name, value)
        else:
            _check_values(value, field.encode_name)
            yield _Piece(name, "value", _encode(value))


def _numeric(value: object) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int, float}


def _numbers(name: str, param: str, numbers: list[Any]) -> Iterator[_Piece]:
    if len(numbers) > MAX_NUMBERS:
        message = f"'{param}' takes at most {MAX_NUMBERS:,} numbers, got {len(numbers):,}."
        raise RequestError(message, param)
    for at in range(0, len(numbers), NUMBERS):
        yield _Piece(name, "numbers", _encode(numbers[at : at + NUMBERS]))


def _items(name: str, param: str, items: list[Any]) -> Iterator[_Piece]:
    if len(items) > MAX_ITEMS:
        raise RequestError(f"'{param}' takes at most {MAX_ITEMS:,} items, got {len(items):,}.", param)
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
                yield _Piece(name, "items", _encode(items[begun:i]))
            begun, size = i, size if begun == i else 0
        if long:
            yield _Piece(name, "open", b"")
            yield from _numbers(name, f"{param}[{i}]", item)
            begun, size = i + 1, 0
    if begun < len(items):
        yield _Piece(name, "items", _encode(items[begun:]))


def _check_values(value: object, param: str) -> None:
    """Raise `RequestError` for one of more than `MAX_VALUES` values, those inside counted too."""
    count, ahead = 0, [value]
    while ahead:
        one = ahead.pop()
        if isinstance(one, msgspec.Struct):
            one = msgspec.structs.asdict(one)
        inner = one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        count += len(inner)
        if count > MAX_VALUES:
            raise RequestError(f"'{param}' has more than {MAX_VALUES:,} values.", param)
        ahead += inner


# -- the loop's side -------------------------------------------------------------------------------


async def assembled(kind: type[T], data: bytes) -> T:
    """The Struct that `BodyWorker` decoded. Raises its `RequestError`."""
    view = memoryview(data)
    (length,) = _LENGTH.unpack_from(view)
    at = _LENGTH.size + length
    index = msgspec.msgpack.decode(view[_LENGTH.size : at], type=Index)
    if index.wrong:
        raise RequestError(index.wrong, index.param)
    fields: dict[str, Any] = {}
    loop = asyncio.get_running_loop()
    for cut in index.cuts:
        if cut.kind == "items":
            fields.setdefault(cut.field, _Items(loop))
        _add(fields, cut, kind, view[at : at + cut.size])
        at += cut.size
        await asyncio.sleep(0)
    return kind(**{name: "".join(v.parts) if isinstance(v, _Text) else v for name, v in fields.items()})


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


class _Text:
    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: list[str] = []


def _add(fields: dict[str, Any], cut: Cut, kind: Any, piece: memoryview) -> None:
    match cut.kind:
        case "value":
            fields[cut.field] = _decoder(kind, cut.field).decode(piece)
        case "raw":
            fields[cut.field] = msgspec.Raw(bytes(piece))
        case "text":
            fields.setdefault(cut.field, _Text()).parts.append(str(piece, "utf-8"))
        case "items":
            fields[cut.field].extend(_decoder(kind, cut.field).decode(piece))
        case "open":
            fields.setdefault(cut.field, []).append([])
        case "numbers":
            listed = fields.setdefault(cut.field, [])
            inner = listed[-1] if listed and isinstance(listed[-1], list) else listed
            inner.extend(msgspec.msgpack.decode(piece))


@lru_cache
def _decoder(kind: Any, name: str) -> msgspec.msgpack.Decoder[Any]:
    (found,) = (field.type for field in msgspec.structs.fields(kind) if field.name == name)
    return msgspec.msgpack.Decoder(found)
