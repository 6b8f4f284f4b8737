"""`/v1/files`: uploads for batches, streamed to disk, and output files of batches."""

from __future__ import annotations

import asyncio
import os
import secrets
import sqlite3
import time
from collections.abc import Awaitable
from functools import partial
from pathlib import Path
from typing import TypeVar

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.multipart import MultipartReader

from app.api.request.routing import AFTER, DELETED, LISTED, ORDER, Routes, Schema, limited, newest_first, page
from app.batch.batches import Batches
from app.batch.records import FileRecord
from app.batch.store import Disk, Page, Store
from app.http.errors import HttpError
from app.http.form import read_form
from app.http.report import readable
from app.http.tenant import tenant
from core.errors import BodyTooLarge, NotFound, RequestError, field_error

ROUTES = Routes()
FILE = "id object bytes filename purpose"

T = TypeVar("T")

MAX_FILE = 100 * 10**6
"""Bytes. OpenAI takes 200 MB for a batch of the same 50,000 lines."""
MAX_FIELD = 4096
"""Bytes of any field but the file."""
MAX_FIELDS = 16
MAX_PARTS = 64
"""Repeated fields count."""
MAX_NAME = 255
CHUNK = 1 << 16
"""Bytes read at a time; aiohttp buffers some four of these for each paused upload."""
IDLE_SECONDS = 60.0
"""How long an upload may pause."""

PURPOSES = ("batch",)

UPLOAD: Schema = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": list(PURPOSES)},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000},
    },
}
QUERY: Schema = {"purpose": {"type": "string"}, "after": AFTER, "order": ORDER, "limit": limited(10_000)}


@ROUTES.add("POST /v1/files", form=UPLOAD, has=FILE)
async def upload(request: web.Request) -> object:
    """Take a file of purpose `batch`. Never held in memory: a chunk at most."""
    if not request.content_type.startswith("multipart/form-data"):
        raise HttpError(415, "Send the file as multipart/form-data, with a field 'purpose'.")
    if (request.content_length or 0) > MAX_FILE + (1 << 16):
        raise _too_large()
    receipt = Upload(request.app[BATCHES].store, tenant())
    try:
        try:
            await receipt.read(read_form(request))
        except TimeoutError:
            raise HttpError(408, "The upload stalled.") from None
        except (ValueError, AssertionError, HttpProcessingError, web.RequestPayloadError) as error:
            raise RequestError(f"The form is malformed: {str(error)[:200]!r}.") from None
        return await receipt.keep()
    finally:
        await receipt.close()


class Upload:
    """A form on its way to the disk. Owner: event loop; the file is touched in the store's thread."""

    def __init__(self, store: Store, owner: str) -> None:
        self._store = store
        self._owner = owner
        self._id = f"file-{secrets.token_hex(12)}"
        self._file: int | None = None
        self._name: str | None = None
        self._size = 0
        self._reserved = 0
        """Bytes reserved on the disk; a file that is kept is counted there."""
        self._fields: dict[str, str] = {}

    async def read(self, form: MultipartReader) -> None:
        """Everything up to the end of the form. Raises `BodyTooLarge`, and what aiohttp raises for
        what is no form."""
        parts = 0
        while (part := await _within_timeout(form.next())) is not None:
            parts += 1
            if parts > MAX_PARTS:
                raise RequestError(f"The form has more than {MAX_PARTS} parts.")
            if not isinstance(part, BodyPartReader):
                raise RequestError("Forms do not nest.")
            if part.name == "file" and self._name is None:
                self._name = readable(part.filename or "upload.jsonl")[:MAX_NAME]
                await self._take(part)
            elif part.name and part.name != "file" and len(self._fields) < MAX_FIELDS:
                self._fields[part.name] = await self._field(part)
            else:
                raise RequestError("The form has unexpected parts.", part.name)

    async def keep(self) -> FileRecord:
        """Check the form and make the upload a file. Raises `RequestError`."""
        purpose = self._fields.get("purpose")
        if purpose not in PURPOSES:
            raise field_error("purpose", f"must be {' or '.join(map(repr, PURPOSES))}")
        if self._name is None:
            raise field_error("file", "is missing")
        now = int(time.time())
        record = FileRecord(
            id=self._id,
            bytes=self._size,
            created_at=now,
            filename=self._name,
            purpose=purpose,
            expires_at=self._expiry(now),
        )

        def keep(disk: Disk) -> None:
            disk.purge()
            self._shut(sync=True)
            path = disk.path(f"{self._id}.part").rename(disk.path(self._id))
            try:
                disk.add_file(self._owner, record)
            except (sqlite3.Error, ValueError, OverflowError):  # or the file would have no record
                path.unlink()
                raise
            self._release(disk)

        await self._store.run(keep)
        return record

    async def close(self) -> None:
        """Remove what an upload that was not kept has left."""

        def close(disk: Disk) -> None:
            self._shut()
            disk.path(f"{self._id}.part").unlink(missing_ok=True)
            self._release(disk)

        # Shielded: a client that goes away in the middle cancels the handler that awaits this.
        await asyncio.shield(self._store.run(close))

    async def _take(self, part: BodyPartReader) -> None:
        def begin(disk: Disk) -> None:
            path = disk.path(f"{self._id}.part")
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)

        await self._store.run(begin)
        while chunk := await _within_timeout(part.read_chunk(CHUNK)):
            if self._size + len(chunk) > MAX_FILE:
                raise _too_large()
            await self._store.run(partial(self._write, bytes(chunk)))

    async def _field(self, part: BodyPartReader) -> str:
        value = b""
        while chunk := await _within_timeout(part.read_chunk(MAX_FIELD)):
            value += chunk
            if len(value) > MAX_FIELD:
                raise RequestError(f"The field {part.name!r} is too long.", part.name)
        return value.decode()

    def _write(self, data: bytes, disk: Disk) -> None:
        assert self._file is not None
        disk.reserve(len(data))
        self._reserved += len(data)
        self._size += len(data)
        left = memoryview(data)
        while left:
            left = left[os.write(self._file, left) :]

    def _release(self, disk: Disk) -> None:
        disk.release(self._reserved)
        self._reserved = 0

    def _shut(self, sync: bool = False) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            if sync:
                os.fsync(file)
            os.close(file)

    def _expiry(self, now: int) -> int | None:
        text = self._fields.get("expires_after[seconds]")
        if text is None:
            return None
        if not (text.isascii() and text.isdigit() and len(text) <= 12 and 3600 <= int(text) <= 2592000):
            raise field_error("expires_after", "takes 3600 to 2592000 seconds")
        return now + int(text)


async def _within_timeout(step: Awaitable[T]) -> T:
    """The next part of the form. Raises `TimeoutError` when none comes."""
    async with asyncio.timeout(IDLE_SECONDS):
        return await step


def _too_large() -> BodyTooLarge:
    return BodyTooLarge(f"The file is larger than {MAX_FILE} bytes, the most this server takes.", "file")


@ROUTES.add("GET /v1/files", has=LISTED, query=QUERY)
async def files(request: web.Request) -> object:
    """The list, newest first unless `order=asc`."""
    query = request.query
    purpose, after, newest = query.get("purpose"), query.get("after"), newest_first(query)
    limit = page_limit(query.get("limit"), 10_000, 10_000)
    store, wanted, owner = request.app[BATCHES].store, Page(after, limit + 1, newest), tenant()
    listed = await store.run(lambda disk: disk.files(owner, purpose, wanted))
    return page(listed, [each.id for each in listed], limit)


@ROUTES.add("GET /v1/files/{id}", has=FILE)
async def file(request: web.Request) -> object:
    """One file's record."""
    id, owner = request.match_info["id"], tenant()
    return await request.app[BATCHES].store.run(lambda disk: disk.file(owner, id))


@ROUTES.add("GET /v1/files/{id}/content", media="application/octet-stream")
async def content(request: web.Request) -> web.StreamResponse:
    """One file's bytes."""
    id, owner = request.match_info["id"], tenant()
    path = await request.app[BATCHES].store.run(lambda disk: _content(disk, owner, id))
    try:
        _ = request.http_range
    except ValueError as error:
        raise HttpError(416, "The header 'Range' must be 'bytes=FIRST-LAST'.", "bad_range") from error
    # Sent as an attachment without a type: a browser must not render what a client uploaded.
    headers = {"Content-Type": "application/octet-stream", "Content-Disposition": "attachment"}
    return web.FileResponse(path, headers=headers)


def _content(disk: Disk, owner: str, id: str) -> Path:
    path = disk.path(disk.file(owner, id).id)
    if not path.is_file():
        raise NotFound(f"The content of the file {id!r} is gone from the server's disk.", "file_id")
    return path


@ROUTES.add("DELETE /v1/files/{id}", has=DELETED)
async def delete(request: web.Request) -> object:
    """Remove a file, unless a batch still needs it."""
    id, owner = request.match_info["id"], tenant()
    await request.app[BATCHES].store.run(lambda disk: disk.delete_file(owner, id))
    return {"id": id, "object": "file", "deleted": True}


def page_limit(text: str | None, default: int, most: int) -> int:
    """`limit` of a query. Raises `RequestError`."""
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= most):
        raise field_error("limit", f"must be between 1 and {most}")
    return int(text[:9])


BATCHES = web.AppKey("batches", Batches)
