"""A connection between node 0 and another: messages in order, and an end as soon as one side is gone."""

from __future__ import annotations

import socket
from contextlib import suppress

from core.errors import EngineFailed
from gpu.nodes.wire import Message, message_of, pack

LENGTH = 4
"""Bytes before a message: its length, the least significant first."""
MOST_BYTES = 2**31
"""Maximum bytes of a message: the embeddings of the longest prompt take as many."""
ALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 25_000))
"""A host that lost its power closes no connection: its peers probe it after 10 s and give up after 25."""


class NodeLost(EngineFailed):
    """The other side has closed the connection, or said what is no message."""


class Channel:
    """Owner: one thread that sends and one that receives; `hang_up` from any."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        """`name` is the other side's, for errors. Owns the `connection`."""
        self.name, self._connection = name, connection
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ALIVE:
            if hasattr(socket, option):  # Linux has all of them
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    @property
    def local(self) -> str:
        """This side's address."""
        return str(self._connection.getsockname()[0])

    def send(self, message: Message) -> None:
        """Blocks while the other side's buffers are full. Raises `NodeLost`."""
        data = pack(message)
        try:
            self._connection.sendall(len(data).to_bytes(LENGTH, "little") + data)
        except OSError as error:
            raise NodeLost(f"{self.name} is gone: {error.strerror or error}") from error

    def receive(self, seconds: float | None = None, most: int = MOST_BYTES) -> Message:
        """The next message of up to `most` bytes. Raises `NodeLost`, also where none has come after so many
        `seconds`."""
        try:
            self._connection.settimeout(seconds)
            size = int.from_bytes(self._read(LENGTH), "little")
            if size > most:
                raise NodeLost(f"{self.name} does not speak as a node does")
            return message_of(self._read(size))
        except OSError as error:
            raise NodeLost(f"{self.name} is gone: {error.strerror or error}") from error
        except ValueError as error:
            raise NodeLost(f"{self.name} does not speak as a node does: {error}") from error

    def hang_up(self) -> None:
        """Both sides read the end from now on."""
        with suppress(OSError):  # the other side was faster
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Call last, when no thread uses it."""
        self._connection.close()

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view, have = memoryview(data), 0
        while have < size:
            got = self._connection.recv_into(view[have:])
            if not got:
                raise NodeLost(f"{self.name} has closed the connection")
            have += got
        return data
