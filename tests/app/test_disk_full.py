"""A disk without room: 507 in plain words, no traceback, and nothing that was accepted is lost."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from app.api.openai import files
from app.api.responses.background import RESPONSES
from app.api.responses.store import Store
from app.batch import batches
from app.batch.journal import Journal
from app.batch.store import Disk
from core.errors import DiskFull
from tests.rigs.batches import Rig, line
from tests.rigs.responses import record
from tests.rigs.server import Server
from tests.rigs.wait import until


def full(disk: Any) -> None:
    """A database that may not grow."""
    disk._db.execute("PRAGMA max_page_count = 1")


def full_device(*_: object) -> int:
    return os.open("/dev/full", os.O_WRONLY)


def no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def said(caplog: pytest.LogCaptureFixture) -> bool:
    """The log has no traceback."""
    return all(record.exc_info is None for record in caplog.records)


async def test_an_upload_without_room_is_507_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with Rig(tmp_path) as rig:
        await rig.upload(b"{}\n")
        with monkeypatch.context() as patch:
            patch.setattr(files, "os", SimpleNamespace(**{**vars(os), "open": full_device}))
            with pytest.raises(openai.InternalServerError) as told:
                await rig.upload(b"{}\n")
        assert (told.value.status_code, told.value.code) == (507, "disk_full")
        assert len(list((tmp_path / "files").iterdir())) == 1
        await rig.upload(b"{}\n")
    assert said(caplog)


async def test_a_record_without_room_is_507_and_leaves_no_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Rig(tmp_path) as rig:
        id = await rig.upload(b"{}\n" * 10)
        await rig.batches.store.run(full)
        with pytest.raises(openai.InternalServerError) as told:
            for _ in range(200):  # what pages there are fill up first
                await rig.upload(b"{}\n")
        assert told.value.status_code == 507
        known = await rig.client.files.list()
        assert {path.name for path in (tmp_path / "files").iterdir()} == {file.id for file in known.data}
        assert id in {file.id for file in known.data}
    assert said(caplog)


async def test_a_batch_waits_for_room_and_then_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(batches, "RETRY", 0.01)
    async with Rig(tmp_path) as rig:
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "append", no_room)
            batch = await rig.submit([line(f"l{i}") for i in range(4)])
            await until(lambda: "disk is full" in caplog.text)
        done = await rig.ended(batch.id)
        assert done.status == "completed"
        assert len(await rig.records(done.output_file_id)) == 4
    assert said(caplog)


async def test_a_directory_without_room_is_let_go_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Rig(tmp_path) as rig:
        with monkeypatch.context() as patch:
            patch.setattr(Disk, "_connect", no_room)
            with pytest.raises(openai.InternalServerError) as told:
                await rig.upload(b"{}\n")
        assert told.value.status_code == 507
        await rig.upload(b"{}\n")


async def test_a_response_without_room_is_answered_and_not_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path, 10**7)
    assert await store.put(record("a"))
    full(store._disk)
    large = record("b", events=os.urandom(1 << 20))
    assert not await store.put(large)
    with pytest.raises(DiskFull):
        await store.require(large)
    assert (await store.get("me", "a")).id == "a"
    await store.close()
    assert "disk is full" in caplog.text
    assert said(caplog)


async def test_a_response_in_the_background_is_nothing_without_room(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    store = server.app[RESPONSES].store
    assert await store.put(record("a"))
    full(store._disk)
    large = {f"k{number}": "v" * 500 for number in range(16)}
    body = {"input": "x", "background": True, "max_output_tokens": 2, "metadata": large}
    status, told = await server.post("/v1/responses", body)
    assert (status, told["error"]["code"]) == (507, "disk_full")
    assert said(caplog)
