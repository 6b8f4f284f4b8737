"""Multipart forms, read without holding the loop, with a limit on bytes outside of parts' contents."""

from __future__ import annotations

import asyncio
from typing import cast

from aiohttp import StreamReader, web
from aiohttp.multipart import MultipartReader

from core.errors import RequestError

MAX_FRAME = 1 << 16
"""Maximum bytes outside of parts' contents: preamble, boundaries, headers, epilogue."""
SLICE = 32
"""Reads before the loop gets a turn. Reading data that has arrived does not suspend: a body of line ends held
the loop for as long as its client kept sending."""


def read_form(request: web.Request) -> MultipartReader:
    """The form of a request. Reading it raises `RequestError` above `MAX_FRAME`."""
    return MultipartReader(request.headers, cast(StreamReader, FormStream(request.content)))


class FormStream:
    """The stream for `MultipartReader`, which reads contents by size and everything else by line."""

    __slots__ = ("_frame", "_reads", "_stream")

    def __init__(self, stream: StreamReader) -> None:
        self._stream = stream
        self._reads = 0
        self._frame = 0

    async def readline(self, *, max_line_length: int | None = None) -> bytes:
        """The next line. Raises `RequestError` and `LineTooLong`."""
        await self._turn()
        line = await self._stream.readline(max_line_length=max_line_length)
        self._frame += len(line)
        if self._frame > MAX_FRAME:
            raise RequestError(
                f"The form has more than {MAX_FRAME} bytes before, between and after its parts' contents."
            )
        return line

    async def read(self, size: int) -> bytes:
        """The bytes that have arrived, up to `size`; empty at the end."""
        await self._turn()
        return await self._stream.read(size)

    def unread_data(self, data: bytes) -> None:
        self._stream.unread_data(data)

    def at_eof(self) -> bool:
        return self._stream.at_eof()

    async def _turn(self) -> None:
        self._reads += 1
        if self._reads % SLICE == 0:
            await asyncio.sleep(0)
