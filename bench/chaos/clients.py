"""Clients over plain sockets: they can stop, die or send anything at any point.

Requests are HTTP/1.0: the answer ends with the connection and has no chunks to take apart.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

HANG = 180.0
"""Seconds after which nobody waits for an answer any more: a row must end, whatever is broken."""
TEXT, CHAT, NATIVE = "/v1/completions", "/v1/chat/completions", "/generate"


@dataclass(frozen=True)
class Answer:
    """Status 0: the connection ended before one came."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    """Names in small letters."""
    body: bytes = b""

    @property
    def json(self) -> Any:
        """The body. Raises `ValueError`."""
        return json.loads(self.body)

    @property
    def text(self) -> str:
        """What a completion says, streamed or not; the status and the body where it is none."""
        if self.status != 200:
            return f"{self.status} {self.body[:300]!r}"
        return "".join(choice["text"] for choice in self._choices())

    @property
    def tokens(self) -> list[int]:
        """The ids of a completion that was asked to tell them; none of what is no completion."""
        return [token for choice in self._choices() for token in choice.get("token_ids", ())]

    def _choices(self) -> list[Any]:
        if self.status != 200 or not self.body:
            return []
        streamed = self.headers.get("content-type", "").startswith("text/event-stream")
        told = self.events if streamed else [self.json]  # by its type: a comment may come before all events
        return [each for event in told if event != "[DONE]" for each in event.get("choices", ())]

    @property
    def events(self) -> list[Any]:
        """The payloads of a stream's events, `"[DONE]"` as it is."""
        lines = [line[6:] for line in self.body.split(b"\n\n") if line.startswith(b"data: ")]
        return ["[DONE]" if line == b"[DONE]" else json.loads(line) for line in lines]


def request(method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a request. `body` is sent as it is when it is bytes."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.0", "Host: x", f"Content-Length: {len(data)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join(lines).encode("utf-8", "surrogatepass") + b"\r\n\r\n" + data


def parsed(received: bytes) -> Answer:
    """An answer's parts."""
    head, _, body = received.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split()
    if len(words) < 2 or not words[1].isdigit():
        return Answer(0, {}, received)
    fields = (line.partition(":") for line in lines[1:])
    return Answer(int(words[1]), {name.lower(): value.strip() for name, _, value in fields}, body)


async def exchange(port: int, data: bytes) -> Answer:
    """Send bytes, read to the end. A reset is an end too, a port where nobody listens, and what hangs."""
    received = b""
    with suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(HANG):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(data)
                received = await reader.read()
            finally:
                writer.transport.abort()
    return parsed(received)


async def ask(
    port: int, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
) -> Answer:
    """One request, its answer to the end."""
    return await exchange(port, request(method, path, body, headers))


async def post(port: int, path: str, body: object) -> Answer:
    """The same, with a body."""
    return await ask(port, "POST", path, body, {"Content-Type": "application/json"})


def reset(writer: asyncio.StreamWriter) -> None:
    """End with a reset instead of in an orderly way, as a killed process with unread data does."""
    own: socket.socket = writer.get_extra_info("socket")
    own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
