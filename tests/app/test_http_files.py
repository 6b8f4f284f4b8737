"""`/v1/files`."""

from __future__ import annotations

import asyncio
import io
import os
import time
from pathlib import Path

import aiohttp
import openai
import pytest
from aiohttp import StreamReader
from aiohttp.base_protocol import BaseProtocol

from app.api.openai import files
from app.batch.records import FileRecord
from app.batch.store import Disk
from app.http.form import SLICE, FormStream
from core.errors import Unavailable
from tests.rigs.batches import Rig
from tests.rigs.server import Start
from tests.rigs.wait import until


def kept(root: Path) -> list[str]:
    """Names of the files in the directory."""
    return sorted(path.name for path in (root / "files").iterdir())


async def test_a_file_is_kept_shown_listed_and_removed(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        data = b'{"a": 1}\n' * 300_000  # several chunks
        file = await rig.client.files.create(file=("räum.jsonl", data), purpose="batch")
        assert (file.bytes, file.filename, file.purpose) == (len(data), "räum.jsonl", "batch")
        assert (file.object, file.status) == ("file", "processed")
        assert await rig.client.files.retrieve(file.id) == file
        assert (await rig.client.files.content(file.id)).content == data
        assert (await rig.client.files.delete(file.id)).deleted
        assert kept(tmp_path) == []
        for call in (rig.client.files.retrieve, rig.client.files.content, rig.client.files.delete):
            with pytest.raises(openai.NotFoundError):
                await call(file.id)


async def test_lists_page_in_both_orders(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        ids = [await rig.upload(b"{}\n") for _ in range(5)]
        assert [file.id async for file in rig.client.files.list(limit=2)] == ids[::-1]
        assert [file.id async for file in rig.client.files.list(limit=3, order="asc")] == ids
        assert (await rig.client.files.list(purpose="vision")).data == []
        for query in ("limit=0", "limit=x", "limit=99999", "after=file-x", "order=up"):
            async with rig.http.get(f"/v1/files?{query}") as answer:
                assert answer.status == 400


@pytest.mark.parametrize("name", ["../../escape", "/etc/passwd", "x" * 5000, "..", "lock"])
async def test_a_name_is_only_a_name(tmp_path: Path, name: str) -> None:
    root = tmp_path / "inner"
    async with Rig(root) as rig:
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", b"{}\n", filename=name)
        async with rig.http.post("/v1/files", data=form) as answer:
            assert answer.status == 200
            file = await answer.json()
        assert kept(root) == [file["id"]]
        assert [path.name for path in tmp_path.iterdir()] == ["inner"]
        async with rig.http.get(f"/v1/files/{file['id']}/content") as answer:
            assert answer.headers["Content-Type"] == "application/octet-stream"
            assert answer.headers["Content-Disposition"] == "attachment"


@pytest.mark.parametrize(
    "path", ["..%2flock", "..%2f..%2fetc%2fpasswd", "store.sqlite", "%00", "file-x'%20OR%201=1", "x" * 3000]
)
async def test_an_id_that_is_not_ours_is_a_404(tmp_path: Path, path: str) -> None:
    async with Rig(tmp_path) as rig:
        await rig.upload(b"{}\n")
        for suffix in ("", "/content"):
            async with rig.http.get(f"{rig.url}/v1/files/{path}{suffix}") as answer:
                assert answer.status == 404


async def test_what_is_too_large_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_FILE", 1 << 20)
    async with Rig(tmp_path) as rig:
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", io.BytesIO(b"x" * (2 << 20)), filename="a")
        async with rig.http.post("/v1/files", data=form) as answer:
            assert answer.status == 413

        async def endless() -> object:
            yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
            for _ in range(32):
                yield b"x" * (1 << 16)

        headers = {"Content-Type": "multipart/form-data; boundary=b"}
        async with rig.http.post("/v1/files", data=endless(), headers=headers) as answer:
            assert answer.status == 413
            assert (await answer.json())["error"]["param"] == "file"
        assert kept(tmp_path) == []


FORM = "multipart/form-data; boundary=b"
FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n{}\r\n'
PURPOSE = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'


@pytest.mark.parametrize(
    ("kind", "body", "status", "param"),
    [
        ("application/json", b"{}", 415, None),
        ("multipart/form-data", b"", 400, None),
        (FORM, b"", 400, None),
        (FORM, b"nonsense", 400, None),
        (FORM, FILE + b"--b--\r\n", 400, "purpose"),
        (FORM, PURPOSE + b"--b--\r\n", 400, "file"),
        (FORM, FILE + PURPOSE.replace(b"batch", b"fine-tune") + b"--b--\r\n", 400, "purpose"),
        (FORM, FILE + PURPOSE.replace(b"batch", b"b" * 5000) + b"--b--\r\n", 400, "purpose"),
        (FORM, FILE + PURPOSE.replace(b"batch", b"\xff") + b"--b--\r\n", 400, None),
        (FORM, FILE + FILE + PURPOSE + b"--b--\r\n", 400, "file"),
        (FORM, PURPOSE * 40 + FILE + b"--b--\r\n", 200, None),
        (
            FORM,
            b"".join(PURPOSE.replace(b'"purpose"', b'"p%d"' % i) for i in range(20)) + b"--b--\r\n",
            400,
            "p16",
        ),
        (FORM, b"--b\r\nContent-Type: multipart/mixed; boundary=c\r\n\r\n--c--\r\n--b--\r\n", 400, None),
        (FORM, b"--b\r\n" + b"X: " + b"y" * 20_000 + b"\r\n\r\n\r\n--b--\r\n", 400, None),
        (FORM, FILE[:-4], 400, None),
        (FORM, b"\n" * (1 << 17) + FILE + PURPOSE + b"--b--\r\n", 400, None),
        (FORM, b"--b\r\n" + (b"X: " + b"y" * 8000 + b"\r\n") * 20 + b"\r\n\r\n--b--\r\n", 400, None),
        (FORM, PURPOSE * 65 + FILE + b"--b--\r\n", 400, None),
    ],
)
async def test_forms_of_all_kinds(
    tmp_path: Path, kind: str, body: bytes, status: int, param: str | None
) -> None:
    async with Rig(tmp_path) as rig:
        async with rig.http.post("/v1/files", data=body, headers={"Content-Type": kind}) as answer:
            told = await answer.json()
            assert answer.status == status, told
        if status != 200:
            assert told["error"]["param"] == param or param is None
            assert not (tmp_path / "files").exists() or kept(tmp_path) == []


async def test_an_upload_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        _, writer = await asyncio.open_connection("127.0.0.1", int(rig.url.rpartition(":")[2]))
        head = f"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\nContent-Type: {FORM}\r\n\r\n"
        writer.write(head.encode() + FILE[:-2] + b"x" * 5000)
        await writer.drain()
        await until(lambda: (tmp_path / "files").exists() and kept(tmp_path) != [])
        writer.close()
        await until(lambda: kept(tmp_path) == [])
        await rig.upload(b"{}\n")


async def test_files_expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Rig(tmp_path) as rig:
        file = await rig.client.files.create(
            file=("a", b"{}\n"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        assert file.expires_at == file.created_at + 3600
        old = FileRecord(
            id=file.id, bytes=3, created_at=0, filename="a", purpose="batch", expires_at=int(time.time()) - 1
        )
        await rig.batches.store.run(lambda disk: (disk.delete_file("", file.id), disk.add_file("", old)))
        with pytest.raises(openai.NotFoundError, match="expired"):
            await rig.client.files.retrieve(file.id)
        await rig.upload(b"{}\n")
        assert [f.id async for f in rig.client.files.list()] != [file.id]


async def test_a_full_store_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.batch.store.MAX_STORED", 3)
    async with Rig(tmp_path) as rig:
        await rig.upload(b"{}\n")
        with pytest.raises(openai.BadRequestError, match="Delete some"):
            await rig.upload(b"{}\n")


async def test_uploads_at_once_share_the_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.batch.store.MAX_STORED", 1000)
    monkeypatch.setattr(files, "CHUNK", 64)
    async with Rig(tmp_path) as rig:
        _, writer = await asyncio.open_connection("127.0.0.1", int(rig.url.rpartition(":")[2]))
        head = f"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\nContent-Type: {FORM}\r\n\r\n"
        writer.write(head.encode() + FILE[:-2] + b"x" * 800)
        await until(lambda: any(path.stat().st_size > 600 for path in (tmp_path / "files").glob("*.part")))
        with pytest.raises(openai.BadRequestError, match="Delete some") as refused:
            await rig.upload(b"x" * 500)
        assert refused.value.code == "storage_full"
        writer.close()
        await until(lambda: kept(tmp_path) == [])
        await rig.upload(b"x" * 500)
        await rig.upload(b"x" * 500)
        with pytest.raises(openai.BadRequestError, match="Delete some"):
            await rig.upload(b"x")
        assert len(kept(tmp_path)) == 2


async def test_one_directory_has_one_server(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        await rig.upload(b"{}\n")
        async with Rig(tmp_path) as other:
            with pytest.raises(openai.InternalServerError, match="--data-dir"):
                await other.client.files.list()
    async with Rig(tmp_path) as later:
        assert len((await later.client.files.list()).data) == 1


async def test_a_directory_that_cannot_be_is_a_clear_answer(tmp_path: Path) -> None:
    async with Rig(tmp_path / "file" / "below") as rig:
        (tmp_path / "file").write_text("")
        with pytest.raises(openai.InternalServerError, match="not usable"):
            await rig.client.files.list()


async def test_content_that_cannot_be_sent_is_a_clear_answer(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        path = f"/v1/files/{await rig.upload(b'{}')}/content"
        async with rig.http.get(path, headers={"Range": "bytes=abc"}) as answer:
            assert answer.status == 416
            assert "bytes=FIRST-LAST" in (await answer.json())["error"]["message"]
        async with rig.http.get(path, headers={"Range": "bytes=1-1"}) as answer:
            assert (answer.status, await answer.read()) == (206, b"}")
        (kept,) = (tmp_path / "files").iterdir()
        kept.unlink()
        async with rig.http.get(path) as answer:
            assert answer.status == 404
            assert "is gone" in (await answer.json())["error"]["message"]


async def test_a_damaged_list_of_files_is_a_clear_answer(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        await rig.upload(b"{}\n")
    (tmp_path / "store.sqlite").write_bytes(b"no database" * 1_000)
    async with Rig(tmp_path) as rig:
        for _ in range(2):
            with pytest.raises(openai.InternalServerError, match=r"store\.sqlite, is damaged"):
                await rig.client.files.list()


def test_a_damaged_list_of_files_is_closed_again(tmp_path: Path) -> None:
    """Each request opens it anew: a thousand took as many descriptors, until garbage was collected."""
    (tmp_path / "store.sqlite").write_bytes(b"no database" * 1_000)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(Unavailable) as kept:
        Disk(tmp_path)
    assert kept.tb is not None, "which refers to all that was opened"
    assert len(os.listdir("/proc/self/fd")) == len(before)


async def test_files_can_be_sent_before_the_model_is_there(start: Start) -> None:
    server = await start(ready=False)
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", b"{}\n", filename="a")
    async with server.http.post("/v1/files", data=form) as answer:
        assert answer.status == 200


async def test_lines_that_have_arrived_are_read_in_slices() -> None:
    """A preamble keeps nobody waiting for longer than a slice."""
    protocol = BaseProtocol(asyncio.get_running_loop())
    stream = StreamReader(protocol, 1 << 16, loop=asyncio.get_running_loop())
    stream.feed_data(b"\n" * 1000)
    stream.feed_eof()
    form = FormStream(stream)
    reading = asyncio.create_task(_lines(form))
    turns = 0
    while not reading.done():
        await asyncio.sleep(0)
        turns += 1
    assert reading.result() == 1000
    assert turns >= 1000 // SLICE


async def _lines(form: FormStream) -> int:
    count = 0
    while await form.readline():
        count += 1
    return count


async def test_a_name_that_is_not_utf8_and_a_long_expiry_leave_no_file(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        form = (
            b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            b'--B\r\nContent-Disposition: form-data; name="expires_after[seconds]"\r\n\r\n%b\r\n'
            b'--B\r\nContent-Disposition: form-data; name="file"; filename="\xff.jsonl"\r\n\r\n'
            b"{}\r\n--B--\r\n"
        )
        headers = {"Content-Type": "multipart/form-data; boundary=B"}
        data = form % b"0000000036009999999999999999999"
        async with rig.http.post("/v1/files", data=data, headers=headers) as answer:
            assert answer.status == 400
        assert kept(tmp_path) == []
        async with rig.http.post("/v1/files", data=form % b"3600", headers=headers) as answer:
            assert (answer.status, (await answer.json())["filename"]) == (200, "\ufffd.jsonl")
