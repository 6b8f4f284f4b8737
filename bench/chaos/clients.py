"""Clients over plain sockets: they can stop, disconnect or send anything at any point.

Requests are HTTP/1.0: the answer ends with the connection and is not chunked.
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

REQUEST_TIMEOUT = 180.0
"""Seconds to wait for an answer: a row must end even if the server hangs."""
TEXT, CHAT, NATIVE = "/v1/completions", "/v1/chat/completions", "/generate"


@dataclass(frozen=True)
class Answer:
    """Status 0: the connection ended without an answer."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers by name in lower case."""
    body: bytes = b""

    @property
    def json(self) -> Any:
        """The body. Raises `ValueError`."""
        return json.loads(self.body)

    @property
    def text(self) -> str:
        """Text of a completion, streamed or not; of an error, its status and body."""
        if self.status != 200:
            return f"{self.status} {self.body[:300]!r}"
        return "".join(choice["text"] for choice in self._choices())

    @property
    def tokens(self) -> list[int]:
        """Token ids of a completion with `return_token_ids`; empty for an error."""
        return [token for choice in self._choices() for token in choice.get("token_ids", ())]

    def _choices(self) -> list[Any]:
        if self.status != 200 or not self.body:
            return []
        streamed = self.headers.get("content-type", "").startswith("text/event-stream")
        # By the content type: a comment may come before the first event.
        events = self.events if streamed else [self.json]
        return [each for event in events if event != "[DONE]" for each in event.get("choices", ())]

    @property
    def events(self) -> list[Any]:
        """The payloads of a stream's events, `"[DONE]"` as it is."""
        lines = [line[6:] for line in self.body.split(b"\n\n") if line.startswith(b"data: ")]
        return ["[DONE]" if line == b"[DONE]" else json.loads(line) for line in lines]


def request(method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None) -> bytes:
    """A request as bytes; `body` is encoded as JSON unless it is bytes."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.0", "Host: x", f"Content-Length: {len(data)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join(lines).encode("utf-8", "surrogatepass") + b"\r\n\r\n" + data


def parsed(received: bytes) -> Answer:
    """Parse a response."""
    head, _, body = received.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split()
    if len(words) < 2 or not words[1].isdigit():
        return Answer(0, {}, received)
    fields = (line.partition(":") for line in lines[1:])
    return Answer(int(words[1]), {name.lower(): value.strip() for name, _, value in fields}, body)


async def exchange(port: int, data: bytes, end: bool = False) -> Answer:
    """Send bytes, read until the connection ends: by close, reset, refusal or timeout. With `end` the server
    is told that there will be no more, once it has begun to answer."""
    received = b""
    with suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(REQUEST_TIMEOUT):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(data)
                if end:
                    received = await reader.read(1)
                    writer.write_eof()
                received += await reader.read()
            finally:
                writer.transport.abort()
    return parsed(received)


async def ask(
    port: int, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
) -> Answer:
    """Send one request, read its whole answer."""
    return await exchange(port, request(method, path, body, headers))


async def post(port: int, path: str, body: object) -> Answer:
    """POST a JSON body."""
    return await ask(port, "POST", path, body, {"Content-Type": "application/json"})


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with a TCP reset, as a killed process with unread data does."""
    own: socket.socket = writer.get_extra_info("socket")
    own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
