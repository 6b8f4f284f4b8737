"""The sqlite file of stored responses, with their eviction."""

from __future__ import annotations

import fcntl
import logging
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from app.database import Database
from core.errors import NotFound, RequestError

log = logging.getLogger(__name__)

DAYS = 30
"""How long a response is stored: OpenAI's."""
MAX_ROWS = 100_000
"""Guessed: rows are found by their key, so only a trim depends on their number."""
ROW_BYTES = 512
"""Bytes that a row takes besides its documents (guessed)."""
MAX_HISTORY = 16 * 2**20
"""Bytes of one conversation: twice what a body has by default, and more than any context."""
TOUCH = 60
"""Seconds within which a second use of a response is not recorded: a poll must not be a write."""
TRIM = 64
"""Rows evicted at once."""

ACTIVE = frozenset({"queued", "in_progress"})

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL,
    status TEXT NOT NULL, active INTEGER NOT NULL, created INTEGER NOT NULL, used INTEGER NOT NULL,
    bytes INTEGER NOT NULL, previous TEXT, doc BLOB NOT NULL, input BLOB NOT NULL, events BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS by_use ON responses (active, used, seq);
CREATE INDEX IF NOT EXISTS by_age ON responses (active, created);
CREATE TABLE IF NOT EXISTS totals (rows INTEGER NOT NULL, bytes INTEGER NOT NULL);
INSERT INTO totals SELECT 0, 0 WHERE NOT EXISTS (SELECT 1 FROM totals);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON responses
    BEGIN UPDATE totals SET rows = rows + 1, bytes = bytes + NEW.bytes; END;
CREATE TRIGGER IF NOT EXISTS changed AFTER UPDATE OF bytes ON responses
    BEGIN UPDATE totals SET bytes = bytes + NEW.bytes - OLD.bytes; END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON responses
    BEGIN UPDATE totals SET rows = rows - 1, bytes = bytes - OLD.bytes; END;
"""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.decode
_decode_raw = msgspec.json.Decoder(list[msgspec.Raw]).decode

Item = dict[str, Any]
Doc = dict[str, Any]
"""A response as clients see it."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One response. `doc` is the object that clients see and `input` its own input items (`encode_items`),
    both JSON; `events` the frames of its stream, for clients that read it again."""

    id: str
    owner: str
    status: str
    created: int
    doc: bytes
    input: bytes
    previous: str | None = None
    events: bytes = b""


class Disk(Database):
    """The file. Several servers may share one. Responses that a server left unfinished are marked as failed
    by the next server that opens the file alone."""

    def __init__(self, root: Path, limit: int) -> None:
        """`limit` is in bytes. Raises `OSError` and `sqlite3.Error`."""
        self._limit = limit
        super().__init__(root, "responses.lock")

    def _open(self) -> None:
        alone = self._lock_alone()
        self._connect("responses.sqlite", "NORMAL", _SCHEMA)  # a power cut may cost the last ones, no more
        if alone:
            self._interrupt()
        else:
            log.info("another server keeps its responses in the same file")
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def _interrupt(self) -> None:
        """Mark the responses as failed that no server generates any more."""
        rows = self._db.execute("SELECT id, doc FROM responses WHERE active").fetchall()
        error = {"code": "server_error", "message": "The server stopped while it made this response."}
        for id, text in rows:
            doc = _encode({**_decode(text), "status": "failed", "error": error})
            self._db.execute(
                "UPDATE responses SET status = 'failed', active = 0, doc = ? WHERE id = ?", (doc, id)
            )

    def put(self, record: Record) -> bool:
        """Store a record or its new state, and evict what no longer fits: what is older than `DAYS`, then the
        least recently used. False when it is larger than the whole limit."""
        events = zlib.compress(record.events, 1) if record.events else b""
        size = len(record.doc) + len(record.input) + len(events) + ROW_BYTES
        if size > self._limit:
            return False
        self._db.execute(
            "INSERT INTO responses "
            "(id, owner, status, active, created, used, bytes, previous, doc, input, events) "
            "VALUES (:id, :owner, :status, :active, :created, :used, :bytes, :previous, :doc, :input, "
            ":events) ON CONFLICT (id) DO UPDATE SET "
            "status = excluded.status, active = excluded.active, used = excluded.used, "
            "bytes = excluded.bytes, doc = excluded.doc, events = excluded.events",
            {
                **msgspec.structs.asdict(record),
                "active": record.status in ACTIVE,
                "used": int(time.time()),
                "bytes": size,
                "events": events,
            },
        )
        self._trim()
        return True

    def _trim(self) -> None:
        horizon = int(time.time()) - DAYS * 86400
        self._db.execute("DELETE FROM responses WHERE NOT active AND created <= ?", (horizon,))
        rows, size = self._db.execute("SELECT rows, bytes FROM totals").fetchone()
        while rows > MAX_ROWS or size > self._limit:
            oldest = self._db.execute(
                "SELECT id, bytes FROM responses WHERE NOT active ORDER BY used, seq LIMIT ?", (TRIM,)
            ).fetchall()
            if not oldest:
                return  # all are in progress
            for id, bytes_ in oldest:
                self._db.execute("DELETE FROM responses WHERE id = ?", (id,))
                rows, size = rows - 1, size - bytes_
                if rows <= MAX_ROWS and size <= self._limit:
                    break

    def get(self, owner: str, id: str, param: str) -> Record:
        """The record of a response. Raises `NotFound` naming `param`, also for another owner's."""
        row = self._db.execute(
            f"SELECT used, {', '.join(Record.__struct_fields__)} FROM responses WHERE id = ? AND owner = ?",
            (id, owner),
        ).fetchone()
        if row is None:
            raise NotFound(f"Response with id '{id[:100]}' not found.", param)
        now = int(time.time())
        used, *values = row
        if used + TOUCH <= now:
            self._db.execute("UPDATE responses SET used = ? WHERE id = ?", (now, id))
        record = Record(**dict(zip(Record.__struct_fields__, values, strict=True)))
        if not record.events:
            return record
        return msgspec.structs.replace(record, events=zlib.decompress(record.events))

    def history(self, owner: str, id: str) -> list[Item]:
        """Every item up to the end of response `id`, oldest first. Raises `RequestError`, also for a
        response that is not kept: a 400 as in OpenAI's API, not a 404."""
        param = "previous_response_id"
        turns: list[list[Item]] = []
        size = 0
        following: str | None = id
        while following is not None:
            try:
                record = self.get(owner, following, param)
            except NotFound:
                raise no_previous(following) from None
            if record.status not in ("completed", "incomplete"):
                raise RequestError(f"The response '{record.id}' is {record.status}.", param)
            size += len(record.doc) + len(record.input) + ROW_BYTES
            if size > MAX_HISTORY:
                raise RequestError("The conversation has grown too long.", param)
            turns.append(_items(record))
            following = record.previous
        return [item for turn in reversed(turns) for item in turn]

    def item(self, owner: str, response: str, id: str, param: str) -> Item:
        """One item of a response. Raises `NotFound`."""
        record = self.get(owner, response, param)
        for item in _items(record):
            if item.get("id") == id:
                return item
        raise NotFound(f"Item with id '{id[:100]}' not found.", param)

    def delete(self, owner: str, id: str) -> None:
        """Remove a response. Raises `NotFound`."""
        self.get(owner, id, "response_id")
        self._db.execute("DELETE FROM responses WHERE id = ?", (id,))


def _items(record: Record) -> list[Item]:
    """All items of a response: input, then output."""
    return [*decode_items(record.input), *_decode(record.doc)["output"]]


SLICE = 64
"""Items that are encoded or decoded in one go: megabytes would hold the GIL for as long as they take."""


def encode_items(items: Sequence[Item]) -> bytes:
    """Input items as they are stored: lists of at most `SLICE`, one a line. Not on the loop where many."""
    return b"\n".join(_encode(items[at : at + SLICE]) for at in range(0, len(items), SLICE))


def decode_items(stored: bytes) -> list[Item]:
    """The reverse of `encode_items`. One item of many values may take long: not on the loop."""
    return [_decode(item) for line in stored.splitlines() for item in _decode_raw(line)]


def no_previous(id: str) -> RequestError:
    """The error for a `previous_response_id` that names no kept response."""
    return RequestError(
        f"Previous response with id '{id[:100]}' not found.",
        "previous_response_id",
        "previous_response_not_found",
    )
