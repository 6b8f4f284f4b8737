"""Kept responses: what is found again, by whom, and what goes when there is no room."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from app.api.responses import disk
from app.api.responses.disk import SLICE, decode_items, encode_items
from app.api.responses.store import Store
from core.errors import NotFound, RequestError, Unavailable
from tests.rigs.responses import record

Open = Callable[..., Store]


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[Open]:
    stores: list[Store] = []

    def make(limit: int = 10**6) -> Store:
        stores.append(Store(tmp_path / "data", limit))
        return stores[-1]

    yield make
    for store in stores:
        await store.close()


async def ids(store: Store, *asked: str) -> list[str]:
    found = []
    for id in asked:
        try:
            found.append((await store.get("me", id)).id)
        except NotFound:
            continue
    return found


async def test_a_record_comes_back_as_it_was_also_after_a_restart(opened: Open) -> None:
    kept = record("a", previous="before", events=b"event: x\ndata: {}\n\n" * 100)
    first = opened()
    assert await first.put(kept)
    assert await first.get("me", "a") == kept
    await first.close()
    assert await opened().get("me", "a") == kept


async def test_a_new_state_replaces_the_old_one(opened: Open) -> None:
    store = opened()
    store.put(record("a", "in_progress"))  # not waited for: calls are served in order
    await store.put(record("a", events=b"all"))
    found = await store.get("me", "a")
    assert found.status == "completed" and found.events == b"all"
    assert msgspec.json.decode(found.doc)["status"] == "completed"


async def test_another_owner_sees_nothing(opened: Open) -> None:
    store = opened()
    await store.put(record("a"))
    for ask in (
        store.get("you", "a"),
        store.delete("you", "a"),
        store.item("you", "a", "in-a", "x"),
    ):
        with pytest.raises(NotFound):
            await ask
    with pytest.raises(RequestError, match="not found"):
        await store.history("you", "a")
    assert await ids(store, "a") == ["a"]


async def test_history_goes_back_to_the_first(opened: Open) -> None:
    store = opened()
    await store.put(record("a"))
    await store.put(record("b", previous="a"))
    await store.put(record("c", "incomplete", previous="b"))
    history = [item["id"] for item in await store.history("me", "c")]
    assert history == ["in-a", "out-a", "in-b", "out-b", "in-c", "out-c"]
    assert (await store.item("me", "b", "out-b", "x"))["id"] == "out-b"
    with pytest.raises(NotFound, match="Item"):
        await store.item("me", "b", "out-c", "x")


async def test_history_with_a_gap_is_none(opened: Open) -> None:
    store = opened()
    await store.put(record("b", previous="a"))
    with pytest.raises(RequestError) as missing:
        await store.history("me", "b")
    assert missing.value.code == "previous_response_not_found"
    assert missing.value.param == "previous_response_id"
    await store.put(record("c", "failed"))
    with pytest.raises(RequestError, match="is failed"):
        await store.history("me", "c")


async def test_the_least_used_go_first(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000_000
    monkeypatch.setattr(disk.time, "time", lambda: now)
    store = opened(5 * (disk.ROW_BYTES + 200))
    for id in "abcde":
        await store.put(record(id))
        now += disk.TOUCH
    await ids(store, "a")  # used
    now += disk.TOUCH
    await store.put(record("f"))
    assert await ids(store, *"abcdef") == ["a", "c", "d", "e", "f"]
    await store.put(record("g", doc=msgspec.json.encode({"output": [], "text": "x" * 2000})))
    assert await ids(store, *"abcdefg") == ["f", "g"]


async def test_one_that_is_made_does_not_go(opened: Open) -> None:
    store = opened(disk.ROW_BYTES + 300)
    await store.put(record("a", "in_progress"))
    await store.put(record("b"))
    await store.put(record("c"))
    assert await ids(store, *"abc") == ["a"]


async def test_one_larger_than_the_store_is_not_kept(opened: Open) -> None:
    store = opened(2000)
    await store.put(record("a"))
    assert not await store.put(record("b", input=b"[" + b" " * 2000 + b"]"))
    assert await ids(store, *"ab") == ["a"]


async def test_rows_are_bounded_too(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "MAX_ROWS", 3)
    store = opened()
    for id in "abcdef":
        await store.put(record(id))
    assert await ids(store, *"abcdef") == ["d", "e", "f"]


async def test_old_ones_go(opened: Open) -> None:
    store = opened()
    await store.put(record("a", created=0))
    await store.put(record("b"))
    assert await ids(store, "a", "b") == ["b"]


async def test_deleted_room_is_room_again(opened: Open) -> None:
    store = opened(2 * (disk.ROW_BYTES + 150))
    for turn in range(50):
        assert await store.put(record(f"r{turn}"))
        await store.delete("me", f"r{turn}")
    await store.put(record("a"))
    await store.put(record("b"))
    assert await ids(store, "a", "b") == ["a", "b"]


async def test_what_a_server_left_unfinished_has_failed(opened: Open) -> None:
    first = opened()
    await first.put(record("a", "in_progress"))
    beside = opened()
    assert (await beside.get("me", "a")).status == "in_progress"  # the first one may still make it
    await beside.close()
    await first.close()
    found = await opened().get("me", "a")
    doc = msgspec.json.decode(found.doc)
    assert found.status == doc["status"] == "failed"
    assert doc["error"]["code"] == "server_error" and "stopped" in doc["error"]["message"]


async def test_a_store_of_nothing(opened: Open, tmp_path: Path) -> None:
    store = opened(0)
    assert not store.keeps
    with pytest.raises(NotFound):
        await store.get("me", "a")
    assert not (tmp_path / "data").exists()


async def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file")
    store = Store(tmp_path / "data", 1000)
    assert not await store.put(record("a"))  # an answer is not lost over it
    with pytest.raises(Unavailable, match="cannot be reached"):
        await store.get("me", "a")
    await store.close()


async def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "responses.sqlite").write_bytes(b"no database at all" * 100)
    store = Store(tmp_path, 1000)
    with pytest.raises(Unavailable):
        await store.get("me", "a")
    await store.close()


async def test_after_the_end(opened: Open) -> None:
    store = opened()
    await store.close()
    await store.close()
    assert not await store.put(record("a"))
    with pytest.raises(Unavailable):
        await store.get("me", "a")


async def test_the_count_is_the_sum(opened: Open, tmp_path: Path) -> None:
    """Triggers keep the totals: they must agree with the rows whatever was done."""
    store = opened(3000)
    for turn in range(30):
        await store.put(record(f"r{turn % 7}", events=b"x" * turn, previous=None))
        if turn % 5 == 0:
            await store.delete("me", f"r{turn % 7}")
    await store.close()
    db = sqlite3.connect(tmp_path / "data" / "responses.sqlite")
    assert db.execute("SELECT rows, bytes FROM totals").fetchone() == (
        db.execute("SELECT COUNT(*), SUM(bytes) FROM responses").fetchone()
    )
    db.close()


@pytest.mark.parametrize("count", [0, 1, SLICE - 1, SLICE, SLICE + 1, 3 * SLICE + 5])
def test_items_are_stored_in_slices(count: int) -> None:
    """No one call encodes or decodes more than a slice; whatever a text holds, a line is one slice."""
    items = [{"id": str(i), "content": "\n\r\u2028\x85\x0b" * (i % 3)} for i in range(count)]
    stored = encode_items(items)
    assert decode_items(stored) == items
    assert [len(msgspec.json.decode(line)) for line in stored.splitlines()] == [
        min(SLICE, count - at) for at in range(0, count, SLICE)
    ]
