"""The line of each request: who asked, what came of it, how long it took."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest

from app.http import middleware
from app.logs import FIELDS
from tests.rigs.server import Server
from tests.rigs.wait import until

PROMPT = [5, 6, 7, 8]


class Lines(logging.Handler):
    """Collects the records of the access log."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    """Records of the access log, as they come."""
    log, lines = logging.getLogger(middleware.__name__), Lines()
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    yield lines.records
    log.removeHandler(lines)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_line_has_client_tokens_and_times(
    featured: Server, records: list[logging.LogRecord], stream: bool
) -> None:
    records.clear()
    body = {"prompt": PROMPT, "max_tokens": 8, "n": 2, "ignore_eos": True, "stream": stream}
    async with featured.http.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"}) as response:
        await response.read()
    await until(lambda: bool(records))
    (record,) = records
    said = getattr(record, FIELDS)
    first, total = said.pop("first_token_ms"), said.pop("total_ms")
    assert 0 <= first <= total
    assert said == {
        "client": "127.0.0.1",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "request_id": "mine",
        "prompt_tokens": 4,
        "output_tokens": 16,
    }
    assert record.getMessage() == (
        f"POST /v1/completions 200 {total:.1f} ms mine from 127.0.0.1, 4 prompt and 16 output tokens, "
        f"first after {first:.1f} ms"
    )


async def test_prompts_of_one_request_are_added_up(
    featured: Server, records: list[logging.LogRecord]
) -> None:
    records.clear()
    body = {"prompt": [PROMPT, [*PROMPT, 9]], "max_tokens": 3, "ignore_eos": True}
    await featured.post("/v1/completions", body)
    said = getattr(records[0], FIELDS)
    assert (said["prompt_tokens"], said["output_tokens"]) == (9, 6)


async def test_what_asks_nothing_of_the_engine_has_no_tokens(
    server: Server, records: list[logging.LogRecord]
) -> None:
    async with server.http.get("/nowhere") as response:
        assert response.status == 404
    (record,) = records
    assert getattr(record, FIELDS).keys() == {"client", "method", "path", "status", "total_ms", "request_id"}
    assert record.getMessage().endswith(" from 127.0.0.1")


async def test_a_client_that_left_is_told_by_the_status(
    server: Server, records: list[logging.LogRecord]
) -> None:
    server.engine.manual = True
    asked = asyncio.ensure_future(server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 8}))
    await until(lambda: bool(server.engine.runs))
    asked.cancel()
    await until(lambda: bool(records))
    said = getattr(records[0], FIELDS)
    assert (said["status"], said["prompt_tokens"], said["output_tokens"]) == (middleware.CLIENT_GONE, 4, 0)


async def test_requests_do_not_share_their_counts(featured: Server, records: list[logging.LogRecord]) -> None:
    records.clear()
    bodies = [{"prompt": PROMPT, "max_tokens": n, "ignore_eos": True} for n in range(1, 9)]
    await asyncio.gather(*(featured.post("/v1/completions", body) for body in bodies))
    made = sorted(getattr(record, FIELDS)["output_tokens"] for record in records)
    assert made == list(range(1, 9))
