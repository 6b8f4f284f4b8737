"""Frames between the server and its helper process: a length of four bytes, then msgpack."""

from __future__ import annotations

import struct
from typing import BinaryIO

LENGTH = struct.Struct("<I")


def frame(data: bytes) -> bytes:
    """`data` with its length."""
    return LENGTH.pack(len(data)) + data


def read_frame(source: BinaryIO) -> bytes | None:
    """The next frame, None at the end."""
    head = source.read(LENGTH.size)
    return source.read(*LENGTH.unpack(head)) if len(head) == LENGTH.size else None


def write_frame(sink: BinaryIO, data: bytes) -> None:
    """Send one frame at once."""
    sink.write(frame(data))
    sink.flush()
