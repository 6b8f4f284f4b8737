"""Storage of files and batches: a directory and an sqlite file in it, used by one thread."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Literal

import msgspec

from app.batch.journal import read_tally
from app.batch.records import Batch, FileRecord
from app.database import Database, DatabaseThread
from core.errors import NotFound, RequestError, Unavailable, check_disk_full, field_error

MAX_STORED = 20 * 2**30
"""Bytes of all files and uploads: clients must not be able to fill the disk."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL, expires_at INTEGER, doc BLOB NOT NULL, owner TEXT NOT NULL DEFAULT ''
);
CREATE TABLE IF NOT EXISTS batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, active INTEGER NOT NULL,
    input TEXT NOT NULL, doc BLOB NOT NULL, owner TEXT NOT NULL DEFAULT ''
);
"""
_OWNER = "ALTER TABLE {} ADD COLUMN owner TEXT NOT NULL DEFAULT ''"
"""Upgrades directories from before there were owners: their files belong to no key."""

_file = msgspec.json.Decoder(FileRecord).decode
_batch = msgspec.json.Decoder(Batch).decode
_encode = msgspec.json.Encoder().encode


class Page(msgspec.Struct, frozen=True):
    """Which part of a list: at most `limit` entries, those after the one named `after`."""

    after: str | None
    limit: int
    newest: bool = True
    """Newest first; else oldest first."""


class Disk(Database):
    """The directory of files, and the records of files and batches."""

    def __init__(self, root: Path) -> None:
        """Raises `Unavailable` when the directory is unusable or used by another server."""
        self._files = root / "files"
        self._reserved = 0
        try:
            super().__init__(root, "lock")
        except OSError as error:
            check_disk_full(error)
            raise Unavailable(
                f"The directory for files and batches is not usable: {error.strerror}. See --data-dir."
            ) from error
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):  # a full disk, a lock
                raise
            raise Unavailable(
                f"The list of files and batches, {root / 'store.sqlite'}, is damaged: {error}. Restore it, "
                "or move it away to begin anew."
            ) from error

    def _open(self) -> None:
        if not self._lock_alone():
            raise Unavailable(
                "Another server keeps its files and batches in the same directory; start this one with "
                "a --data-dir of its own."
            )
        self._files.mkdir(exist_ok=True, mode=0o700)
        self._connect("store.sqlite", "FULL", _SCHEMA)
        for table in ("files", "batches"):
            if not any(row[1] == "owner" for row in self._db.execute(f"PRAGMA table_info({table})")):
                self._db.execute(_OWNER.format(table))
        for torn in self._files.glob("*.part"):
            torn.unlink()
        self.purge()
        self._recount()

    # -- files -------------------------------------------------------------------------------------

    def path(self, id: str) -> Path:
        """The path of a file. `id` must be one that we made, never a client's text."""
        return self._files / id

    def reserve(self, size: int) -> None:
        """Reserve bytes for an upload. Raises `RequestError` when the storage is full."""
        if self._kept + self._reserved + size > MAX_STORED:
            message = (
                f"Files take {self._kept} bytes and uploads {self._reserved}, and this server keeps "
                f"{MAX_STORED}. Delete some first."
            )
            raise RequestError(message, "file", "storage_full")
        self._reserved += size

    def release(self, size: int) -> None:
        """Return a reservation: the upload has become a file, or failed."""
        self._reserved -= size

    def _weigh(self) -> None:
        (self._kept,) = self._db.execute("SELECT COALESCE(SUM(bytes), 0) FROM files").fetchone()

    def add_file(self, owner: str, record: FileRecord) -> None:
        """Add or replace the record of a file that exists at its path."""
        self._db.execute(
            "INSERT INTO files (id, purpose, bytes, expires_at, doc, owner) VALUES (?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (id) DO UPDATE SET bytes = excluded.bytes, doc = excluded.doc",
            (record.id, record.purpose, record.bytes, record.expires_at, _encode(record), owner),
        )
        self._weigh()

    def file(self, owner: str, id: str) -> FileRecord:
        """The record of a file. Raises `NotFound`, also for another owner's."""
        record = _file(self._doc("file", owner, id))
        if record.expires_at is not None and record.expires_at <= time.time():
            raise NotFound(f"The file {id!r} has expired.", "file_id")
        return record

    def files(self, owner: str, purpose: str | None, page: Page) -> list[FileRecord]:
        """Files of an owner, of one purpose if given."""
        return [_file(doc) for (doc,) in self._page("files", owner, page, purpose)]

    def delete_file(self, owner: str, id: str) -> None:
        """Remove a file. Raises `NotFound`, and `RequestError` while a batch still reads it."""
        self.file(owner, id)
        row = self._db.execute("SELECT id FROM batches WHERE input = ? AND active", (id,)).fetchone()
        if row is not None:
            raise RequestError(f"The file is the input of {row[0]}, which is not done.", "file_id")
        self._drop(id)
        self._weigh()

    def purge(self) -> None:
        """Remove expired files that no batch needs."""
        rows = self._db.execute(
            "SELECT id FROM files WHERE expires_at <= ? "
            "AND id NOT IN (SELECT input FROM batches WHERE active)",
            (int(time.time()),),
        )
        for (id,) in rows.fetchall():
            self._drop(id)
        self._weigh()

    def _drop(self, id: str) -> None:
        self._db.execute("DELETE FROM files WHERE id = ?", (id,))
        self.path(id).unlink(missing_ok=True)

    # -- batches -----------------------------------------------------------------------------------

    def put_batch(self, owner: str, batch: Batch) -> None:
        """Store this state of a batch."""
        self._db.execute(
            "INSERT INTO batches (id, active, input, doc, owner) VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT (id) DO UPDATE SET active = excluded.active, doc = excluded.doc",
            (batch.id, batch.active, batch.input_file_id, _encode(batch), owner),
        )

    def batch(self, owner: str, id: str) -> Batch:
        """The record of a batch. Raises `NotFound`, also for another owner's."""
        return _batch(self._doc("batch", owner, id))

    def batches(self, owner: str, page: Page) -> list[Batch]:
        """Batches of an owner."""
        return [_batch(doc) for (doc,) in self._page("batches", owner, page)]

    def _recount(self) -> None:
        """Update the totals of batches from their journals: a record is only as new as its last status."""
        rows = self._db.execute("SELECT owner, doc FROM batches WHERE active").fetchall()
        for owner, batch in ((owner, _batch(doc)) for owner, doc in rows):
            if (counted := read_tally(self._files, batch).update(batch)) != batch:
                self.put_batch(owner, counted)

    def count_active(self) -> int:
        """Number of batches that have not ended."""
        count: int = self._db.execute("SELECT COUNT(*) FROM batches WHERE active").fetchone()[0]
        return count

    def next_batch(self) -> tuple[str, Batch] | None:
        """The oldest batch that has not ended, and its owner."""
        row = self._db.execute("SELECT owner, doc FROM batches WHERE active ORDER BY seq LIMIT 1").fetchone()
        return None if row is None else (row[0], _batch(row[1]))

    def _doc(self, kind: Literal["file", "batch"], owner: str, id: str) -> bytes:
        table = "files" if kind == "file" else "batches"
        row = self._db.execute(f"SELECT doc FROM {table} WHERE id = ? AND owner = ?", (id, owner)).fetchone()
        if row is None:
            raise NotFound(f"No such {kind}: {id[:100]!r}.", f"{kind}_id")
        doc: bytes = row[0]
        return doc

    def _page(self, table: str, owner: str, page: Page, purpose: str | None = None) -> list[tuple[bytes]]:
        # `table` is a constant of this file; everything from a client is a parameter.
        where, values = ["owner = ?"], list[object]([owner])
        if page.after:
            row = self._db.execute(
                f"SELECT seq FROM {table} WHERE id = ? AND owner = ?", (page.after, owner)
            ).fetchone()
            if row is None:
                raise field_error("after", f"names {page.after[:100]!r}, which is not here")
            where.append("seq < ?" if page.newest else "seq > ?")
            values.append(row[0])
        if purpose is not None:
            where.append("purpose = ?")
            values.append(purpose)
        order = "DESC" if page.newest else "ASC"
        return self._db.execute(
            f"SELECT doc FROM {table} WHERE {' AND '.join(where)} ORDER BY seq {order} LIMIT ?",
            (*values, page.limit),
        ).fetchall()


class Store(DatabaseThread[Disk]):
    """The disk, for the event loop."""

    def __init__(self, root: Path) -> None:
        super().__init__("store", lambda: Disk(root))
        self.root = root

    @property
    def exists(self) -> bool:
        """Whether anything was stored, by this server or an earlier one."""
        return (self.root / "store.sqlite").exists()
