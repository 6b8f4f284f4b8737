"""Frames between the server and its helper process: a length of four bytes, then msgpack."""

from __future__ import annotations

import struct
from typing import BinaryIO

import msgspec

LENGTH = struct.Struct("<I")

MEMORY = 2**30
"""Bytes of address space that one job may add."""
TOO_LARGE = f"takes more than {MEMORY >> 30} GB of memory"


class Load(msgspec.Struct, frozen=True, tag=True):
    """Make the task's worker, unless it is there: no part of any job's time."""

    target: str
    state: bytes


class Run(msgspec.Struct, frozen=True, tag=True):
    """One job of a task that was loaded."""

    target: str
    payload: bytes


class Answer(msgspec.Struct, frozen=True):
    """What came of a message: data, or how it failed."""

    data: bytes = b""
    failed: str = ""
    exceeded: str = ""


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
