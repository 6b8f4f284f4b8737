"""Messages between the server and its helper process: a head in msgpack and a blob of bytes.

Large data is in the blob: as a field of the head it would be copied twice with the GIL held. Only bytes are
sent (`send_bytes`, `recv_bytes`): nothing is pickled.
"""

from __future__ import annotations

import socket
import struct
from multiprocessing.connection import Connection

import msgspec

MEMORY = 2**30
"""Bytes of address space that one job may add."""
TOO_LARGE = f"takes more than {MEMORY >> 30} GB of memory"


class Load(msgspec.Struct, frozen=True, tag=True):
    """Make worker number `key` of class `target`, unless it exists. The blob is its state."""

    key: int
    target: str


class Run(msgspec.Struct, frozen=True, tag=True):
    """One job of worker number `key`. The blob is its payload."""

    key: int


class Answer(msgspec.Struct, frozen=True):
    """The result of a message, with data in the blob, or how it failed."""

    failed: str = ""
    exceeded: str = ""


class Wire:
    """One end of a socket pair. Calls block; one thread at a time."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._connection = Connection(end.dup().detach())

    def limit(self, seconds: float) -> None:
        """Timeout of a call, which then raises `BlockingIOError`: also in the middle of a message, unlike
        `Connection.poll`."""
        limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def send(self, head: Load | Run | Answer, blob: bytes) -> None:
        """Send one message. Raises `OSError`."""
        self._connection.send_bytes(msgspec.msgpack.encode(head))
        self._connection.send_bytes(blob)

    def receive(self) -> tuple[bytes, bytes]:
        """Receive the next message's head and blob. Raises `EOFError` at the end, and `OSError`."""
        return self._connection.recv_bytes(), self._connection.recv_bytes()

    def close(self) -> None:
        """Close: the other end gets `EOFError`."""
        self._connection.close()
        self._socket.close()
