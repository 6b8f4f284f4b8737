"""The helper process: what fails, what is killed, and what goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.helper.process import Child, HelperProcess, ProcessEnded
from core.errors import Overloaded
from core.helper import Exceeded, Failed
from tests.rigs.helper_task import TASK
from tests.rigs.wait import PATIENCE


@pytest.fixture
async def helper() -> AsyncIterator[HelperProcess]:
    made = HelperProcess(3)
    yield made
    made.close()


async def test_megabytes_come_back_as_they_went(helper: HelperProcess) -> None:
    payload = os.urandom(9_000_000)
    assert await helper.run(TASK, payload, PATIENCE) == b"state " + payload


@pytest.mark.parametrize(
    ("payload", "error"),
    [(b"raise", Failed), (b"memory", Exceeded), (b"die", Exceeded), (b"for ever", Exceeded)],
)
async def test_a_job_that_fails_fails_alone(
    helper: HelperProcess, payload: bytes, error: type[Exception]
) -> None:
    async def fail() -> None:
        with pytest.raises(error):
            await helper.run(TASK, payload, 0.5 if payload == b"for ever" else PATIENCE)

    failing = asyncio.ensure_future(fail())
    await asyncio.sleep(0)
    assert await helper.run(TASK, b"x", PATIENCE) == b"state x"
    await failing


async def test_what_waits_is_bounded_and_goes_in_order(helper: HelperProcess) -> None:
    done: list[bytes] = []

    async def run(payload: bytes) -> None:
        await helper.run(TASK, payload, PATIENCE)
        done.append(payload)

    jobs = [asyncio.ensure_future(run(payload)) for payload in (b"1", b"2", b"3")]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await helper.run(TASK, b"4", PATIENCE)
    await asyncio.gather(*jobs)
    assert done == [b"1", b"2", b"3"]


def test_a_process_that_stops_reading_passes_its_limit() -> None:
    child = Child()
    try:
        child.load(TASK)
        os.kill(int(child.run(TASK, b"pid", PATIENCE)[1]), signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            child.run(TASK, bytes(9_000_000), 0.2)
    finally:
        child.reap()


def test_a_process_that_is_killed_while_it_is_sent_a_job_is_gone() -> None:
    child = Child()
    try:
        child.load(TASK)
        child.kill()
        with pytest.raises(ProcessEnded):
            child.run(TASK, bytes(9_000_000), PATIENCE)
    finally:
        child.reap()


SERVER = """
import asyncio
from app.helper.process import HelperProcess
from tests.rigs.helper_task import TASK
async def main():
    helper = HelperProcess()
    print(bytes(await helper.run(TASK, b"pid", 60)).decode(), flush=True)
    await helper.run(TASK, b"for ever", 600)
asyncio.run(main())
"""


def test_it_never_outlives_the_server_even_in_the_middle_of_a_job() -> None:
    server = subprocess.Popen((sys.executable, "-c", SERVER), stdout=subprocess.PIPE)
    assert server.stdout is not None
    pid = int(server.stdout.readline())
    server.kill()
    server.wait()
    server.stdout.close()
    deadline = time.monotonic() + PATIENCE
    while _runs(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
