"""Messages between the server and its helper process: a head in msgpack, and a blob as it is.

Megabytes travel in the blob: in a field of the head they would be copied twice with the GIL held.
"""

from __future__ import annotations

import struct
from typing import BinaryIO

import msgspec

LENGTHS = struct.Struct("<II")
"""Of head and blob."""

MEMORY = 2**30
"""Bytes of address space that one job may add."""
TOO_LARGE = f"takes more than {MEMORY >> 30} GB of memory"


class Load(msgspec.Struct, frozen=True, tag=True):
    """Make worker number `key` of class `target`, unless it is there: no part of any job's time. The blob is
    its state."""

    key: int
    target: str


class Run(msgspec.Struct, frozen=True, tag=True):
    """One job of worker number `key`. The blob is its payload."""

    key: int


class Answer(msgspec.Struct, frozen=True):
    """What came of a message, with data in the blob, or how it failed."""

    failed: str = ""
    exceeded: str = ""


def framed(head: Load | Run | Answer, blob: bytes) -> tuple[bytes, bytes]:
    """The two pieces that are sent one after the other."""
    packed = msgspec.msgpack.encode(head)
    return LENGTHS.pack(len(packed), len(blob)) + packed, blob


def read_message(source: BinaryIO) -> tuple[bytes, bytes] | None:
    """Head and blob of the next message, None at the end."""
    lengths = source.read(LENGTHS.size)
    if len(lengths) < LENGTHS.size:
        return None
    head, blob = LENGTHS.unpack(lengths)
    return source.read(head), source.read(blob)
