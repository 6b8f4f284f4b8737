"""`/v1/batches` as the openai client uses it, over the real engine with a fake device."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from app.batch.store import Disk, Store
from app.batch.work import Work
from app.service import Health, Phase
from tests.rigs.batches import CONTEXT, Rig, chat_line, jsonl, line
from tests.rigs.requests import CHAT
from tests.rigs.wait import PATIENCE, until

FAILED = Health(Phase.FAILED, "failed", 1.0, "the engine failed")


async def test_a_batch_from_upload_to_results(tmp_path: Path) -> None:
    lines = [chat_line(f"c{i}") for i in range(20)]
    lines.append(chat_line("long", max_tokens=CONTEXT * 2))
    lines.append(chat_line("odd", temperature="hot"))
    async with Rig(tmp_path) as rig:
        batch = await rig.submit(lines, CHAT)
        assert (batch.status, batch.object, batch.metadata) == ("validating", "batch", {"who": "test"})
        done = await rig.ended(batch.id)
        assert done.status == "completed"
        assert done.request_counts is not None and done.usage is not None
        counts = done.request_counts
        assert (counts.total, counts.completed, counts.failed) == (22, 20, 2)
        assert done.usage.output_tokens == 60
        assert done.usage.total_tokens == done.usage.input_tokens + 60
        answers = await rig.records(done.output_file_id)
        assert set(answers) == {f"c{i}" for i in range(20)}
        answer = answers["c3"]["response"]
        assert answer["status_code"] == 200
        assert answer["body"]["object"] == "chat.completion"
        assert answer["body"]["usage"]["completion_tokens"] == 3
        errors = await rig.records(done.error_file_id)
        assert errors["long"]["response"]["status_code"] == 400
        assert errors["long"]["response"]["body"]["error"]["code"] == "context_length_exceeded"
        assert errors["odd"]["response"]["body"]["error"]["param"] == "temperature"
        made = await rig.client.files.list(purpose="batch_output")
        assert {file.id for file in made.data} == {done.output_file_id, done.error_file_id}


async def test_a_batch_of_embeddings(tmp_path: Path) -> None:
    url = "/v1/embeddings"
    bodies = [{"input": ["hello", "you"]}, {"input": "hello", "encoding_format": "base64"}, {"input": ""}]
    lines = [
        {"custom_id": f"e{i}", "method": "POST", "url": url, "body": body} for i, body in enumerate(bodies)
    ]
    async with Rig(tmp_path) as rig:
        done = await rig.ended((await rig.submit(lines, url)).id)
        assert (done.status, done.request_counts and done.request_counts.completed) == ("completed", 2)
        answers = await rig.records(done.output_file_id)
        data = answers["e0"]["response"]["body"]["data"]
        assert [each["index"] for each in data] == [0, 1] and isinstance(data[0]["embedding"][0], float)
        assert isinstance(answers["e1"]["response"]["body"]["data"][0]["embedding"], str)
        errors = await rig.records(done.error_file_id)
        assert errors["e2"]["response"]["body"]["error"]["param"] == "input"


async def test_lists_are_newest_first_and_page(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        ids = [(await rig.submit([line("a")])).id for _ in range(5)]
        listed = [batch.id async for batch in rig.client.batches.list(limit=2)]
        assert listed == ids[::-1]
        page = await rig.client.batches.list(limit=2, after=ids[1])
        assert ([batch.id for batch in page.data], page.has_more) == ([ids[0]], False)
        for id in ids:
            assert (await rig.ended(id)).status == "completed"


@pytest.mark.parametrize(
    ("data", "code", "number"),
    [
        (b"", "empty_file", None),
        (b"\n\n", "empty_file", None),
        (jsonl([line("a")]) + b"{oops\n", "invalid_json_line", 2),
        (jsonl([line("a"), line("b"), line("a")]), "duplicate_custom_id", 3),
        (jsonl([{**line("a"), "custom_id": 5}]), "invalid_line", 1),
        (jsonl([{**line("a"), "custom_id": ""}]), "invalid_custom_id", 1),
        (jsonl([{**line("a"), "method": "GET"}]), "invalid_method", 1),
        (jsonl([chat_line("a")]), "invalid_url", 1),
        (jsonl([{**line("a"), "body": [1]}]), "invalid_body", 1),
        (b'{"custom_id": "a", "url": "/v1/completions"}', "invalid_body", 1),
        (b"[" * 100_000, "invalid_line", 1),
        (b'{"a":' * 100_000, "invalid_json_line", 1),
        (b"\xff\xfe\n", "invalid_json_line", 1),
    ],
)
async def test_a_file_that_is_no_batch_fails_it_and_names_the_line(
    tmp_path: Path, data: bytes, code: str, number: int | None
) -> None:
    async with Rig(tmp_path) as rig:
        id = await rig.upload(data)
        batch = await rig.client.batches.create(
            input_file_id=id, endpoint="/v1/completions", completion_window="24h"
        )
        failed = await rig.ended(batch.id)
        assert failed.status == "failed"
        assert failed.errors is not None and failed.errors.data
        assert (failed.errors.data[0].code, failed.errors.data[0].line) == (code, number)
        assert rig.executor.plans == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_file_id": "file-nothing"}, "file_id"),
        ({"input_file_id": "../../lock"}, "file_id"),
        ({"input_file_id": None}, "input_file_id"),
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"metadata": {"k": "v" * 600}}, "metadata"),
    ],
)
async def test_a_wrong_batch_names_its_field(tmp_path: Path, fields: dict[str, Any], param: str) -> None:
    async with Rig(tmp_path) as rig:
        body = {
            "input_file_id": await rig.upload([line("a")]),
            "endpoint": "/v1/completions",
            "completion_window": "24h",
            **fields,
        }
        async with rig.http.post("/v1/batches", json=body) as answer:
            assert answer.status in (400, 404)
            assert (await answer.json())["error"]["param"] == param


async def test_what_is_not_there_is_a_404(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        with pytest.raises(openai.NotFoundError):
            await rig.client.batches.retrieve("batch_x")
        with pytest.raises(openai.NotFoundError):
            await rig.client.batches.cancel("batch_x")
        with pytest.raises(openai.BadRequestError):
            await rig.client.batches.list(after="batch_x")


async def test_cancelling_ends_what_runs_and_keeps_what_is_done(tmp_path: Path) -> None:
    async with Rig(tmp_path, auto=False) as rig:
        quick, slow = [line(f"q{i}", 1) for i in range(3)], [line(f"s{i}", 400) for i in range(100)]
        batch = await rig.submit(quick + slow)
        await until(lambda: rig.scheduler.running > 0)
        async with asyncio.timeout(PATIENCE):
            while (await rig.client.batches.retrieve(batch.id)).request_counts.completed < 3:  # type: ignore[union-attr]
                await rig.step()
        assert rig.scheduler.running > 0
        await rig.client.batches.cancel(batch.id)
        done = await rig.ended(batch.id)  # not one step of the device later
        assert done.status == "cancelled"
        assert done.cancelling_at is not None and done.cancelled_at is not None
        assert rig.scheduler.running == 0
        assert set(await rig.records(done.output_file_id)) == {"q0", "q1", "q2"}
        assert done.error_file_id is None
        assert (await rig.client.batches.cancel(batch.id)).status == "cancelled"


async def test_a_batch_that_waits_its_turn_can_be_cancelled(tmp_path: Path) -> None:
    async with Rig(tmp_path, auto=False) as rig:
        first = await rig.submit([line("a", 100)])
        second = await rig.submit([line("a", 100)])
        assert (await rig.client.batches.cancel(second.id)).status == "cancelled"
        assert (await rig.client.batches.retrieve(first.id)).status in ("validating", "in_progress")


async def test_a_done_batch_cannot_be_cancelled(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        batch = await rig.submit([line("a")])
        await rig.ended(batch.id)
        with pytest.raises(openai.BadRequestError, match="completed"):
            await rig.client.batches.cancel(batch.id)


async def test_a_restart_goes_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    lines = [line(f"l{i}", 3, prompt=f"prompt {i}") for i in range(40)]
    async with Rig(tmp_path, auto=False) as rig:
        batch = await rig.submit(lines)
        await until(lambda: rig.scheduler.running > 0)
        async with asyncio.timeout(PATIENCE):
            while (await rig.client.batches.retrieve(batch.id)).request_counts.completed < 10:  # type: ignore[union-attr]
                await rig.step()
    async with Rig(tmp_path) as again:
        done = await again.ended(batch.id)
        assert done.status == "completed"
        counts = done.request_counts
        assert counts is not None
        assert (counts.total, counts.completed, counts.failed) == (40, 40, 0)
        assert set(await again.records(done.output_file_id)) == {f"l{i}" for i in range(40)}
        started = sum(len(plan.new_slots) for plan in again.executor.plans)
        assert started <= 30
        assert done.usage is not None and done.usage.output_tokens == 120


async def stopped(rig: Rig, id: str, least: int) -> None:
    """Run a batch by single steps until at least so many of its lines are done; then stop all batches, as a
    server does that drains."""
    async with asyncio.timeout(PATIENCE):
        while (counts := (await rig.client.batches.retrieve(id)).request_counts) is None or (
            counts.completed < least
        ):
            await rig.step()
    await rig.batches.stop()


async def test_counts_are_right_before_a_restarted_batch_goes_on(tmp_path: Path) -> None:
    async with Rig(tmp_path, auto=False) as rig:
        batch = await rig.submit([line(f"l{i}", 2, prompt=f"prompt {i}") for i in range(20)])
        await until(lambda: rig.scheduler.running > 0)
        await stopped(rig, batch.id, 5)
        before = await rig.batches.store.run(lambda disk: disk.batch("", batch.id))
        written = (tmp_path / "files" / before.output_id).read_bytes().count(b"\n")
    store = Store(tmp_path)
    after = await store.run(lambda disk: disk.batch("", batch.id))
    await store.close()
    assert written >= 5
    assert (after.request_counts.total, after.request_counts.completed) == (20, written)
    assert after.usage is not None and after.usage["output_tokens"] == 2 * written


async def test_a_batch_that_ran_out_of_time_says_what_never_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Rig(tmp_path, auto=False) as rig:
        batch = await rig.submit([line("a", 1), *[line(f"s{i}", 400) for i in range(30)]])
        await until(lambda: rig.scheduler.running > 0)
        async with asyncio.timeout(PATIENCE):
            while (await rig.client.batches.retrieve(batch.id)).request_counts.completed < 1:  # type: ignore[union-attr]
                await rig.step()
        monkeypatch.setattr(Work, "_late", property(lambda self: True))
        done = await rig.ended(batch.id)
        assert done.status == "expired"
        assert set(await rig.records(done.output_file_id)) == {"a"}
        errors = await rig.records(done.error_file_id)
        assert set(errors) == {f"s{i}" for i in range(30)}
        assert {error["error"]["code"] for error in errors.values()} == {"batch_expired"}


@pytest.mark.parametrize("noted", [True, False])
async def test_a_batch_that_expired_and_crashed_at_its_end_is_still_expired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noted: bool
) -> None:
    """`noted`: the lines that never ran are in the error file already, or it crashes between two of them."""
    crashed = asyncio.Event()

    def crash(*_: object) -> None:
        crashed.set()
        raise OSError("the disk is gone")

    async with Rig(tmp_path, auto=False) as rig:
        batch = await rig.submit([line("a", 400)])
        await until(lambda: rig.scheduler.running > 0)
        monkeypatch.setattr(Work, "_late", property(lambda self: True))
        monkeypatch.setattr(*((Disk, "add_file") if noted else (Work, "_append")), crash)
        await until(crashed.is_set)
    monkeypatch.undo()
    async with Rig(tmp_path) as again:
        done = await again.ended(batch.id)
        assert done.status == "expired"
        assert set(await again.records(done.error_file_id)) == {"a"}
        assert done.output_file_id is None


async def test_an_input_file_stays_until_its_batch_is_done(tmp_path: Path) -> None:
    async with Rig(tmp_path, auto=False) as rig:
        batch = await rig.submit([line("a", 400)])
        with pytest.raises(openai.BadRequestError, match=batch.id):
            await rig.client.files.delete(batch.input_file_id)
        await rig.client.batches.cancel(batch.id)
        await rig.ended(batch.id)
        assert (await rig.client.files.delete(batch.input_file_id)).deleted


async def test_a_failed_engine_costs_no_line(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        rig.executor.fail_at = 3
        rig.replicas.on_failure = lambda reason: setattr(rig.service, "health", FAILED)
        batch = await rig.submit([line(f"l{i}", 20) for i in range(5)])
        await until(lambda: rig.engine.failure is not None)
    async with Rig(tmp_path) as again:
        done = await again.ended(batch.id)
        assert done.request_counts is not None
        assert (done.status, done.request_counts.completed) == ("completed", 5)


async def test_a_lost_input_fails_its_batch_and_no_other(tmp_path: Path) -> None:
    async with Rig(tmp_path, auto=False) as rig:
        first = await rig.submit([line("a", 300)])
        lost = await rig.submit([line("b")])
        later = await rig.submit([line("c")])
        (tmp_path / "files" / lost.input_file_id).unlink()
        await rig.client.batches.cancel(first.id)
        failed = await rig.ended(lost.id)
        assert failed.errors is not None and failed.errors.data
        assert (failed.status, failed.errors.data[0].code) == ("failed", "file_not_found")
        async with asyncio.timeout(PATIENCE):
            while (await rig.client.batches.retrieve(later.id)).status != "completed":
                await rig.step()


@pytest.mark.parametrize("stage", ["_attempt", "_validate", "_lines", "_publish"])
async def test_a_fault_of_the_server_fails_its_batch_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """Whatever a stage raises: what was done is published, the batches behind it run."""
    ran = 0
    whole = getattr(Work, stage)

    def raises(work: Work, *args: Any) -> Any:
        nonlocal ran
        ran += 1
        if work.batch.metadata == {"who": "bad"} and (stage != "_attempt" or args[0].custom_id == "b"):
            raise ZeroDivisionError("a fault")
        return whole(work, *args)

    monkeypatch.setattr(Work, stage, raises)
    async with Rig(tmp_path) as rig:
        bad = await rig.submit([line("a"), line("b")], who="bad")
        good = await rig.submit([line("c")])
        failed, done = await rig.ended(bad.id), await rig.ended(good.id)
        assert failed.status == "failed" and failed.errors is not None and failed.errors.data
        assert failed.errors.data[0].code == "internal_error"
        assert "ZeroDivisionError" in (failed.errors.data[0].message or "")
        if stage == "_publish":
            assert "a" in await rig.records(failed.output_file_id)
        assert done.status == "completed" and ran >= 2


async def test_cancelling_before_the_model_is_loaded_keeps_what_is_done(tmp_path: Path) -> None:
    async with Rig(tmp_path, auto=False) as rig:
        batch = await rig.submit([line(f"l{i}", 3, prompt=f"prompt {i}") for i in range(40)])
        await until(lambda: rig.scheduler.running > 0)
        await stopped(rig, batch.id, 5)
        assert (await rig.client.batches.cancel(batch.id)).status == "cancelling"
    async with Rig(tmp_path) as again:
        done = await again.ended(batch.id)
        assert done.status == "cancelled"
        assert done.request_counts is not None and 5 <= done.request_counts.completed < 40
        assert len(await again.records(done.output_file_id)) == done.request_counts.completed


async def test_a_line_that_asks_for_a_stream_has_a_whole_answer(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        done = await rig.ended((await rig.submit([chat_line("a", stream=True)], CHAT)).id)
        (answer,) = (await rig.records(done.output_file_id)).values()
        assert answer["response"]["body"]["object"] == "chat.completion"
