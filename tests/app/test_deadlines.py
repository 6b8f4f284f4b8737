"""A request's own limits of time: `timeout`, and how long its first token may take."""

from __future__ import annotations

import asyncio
import json
from math import inf
from typing import Any

import msgspec
import pytest

from app.text.tokenizer import Tokenizer
from core.config import ServeConfig
from core.types import FinishReason
from tests.rigs.server import Server, Start
from tests.rigs.step_loop import PROMPT, Bench
from tests.rigs.wait import settle, until

HI = [{"role": "user", "content": "hi"}]
SLO = "x-llm-d-slo-ttft-ms"
COMPLETIONS = "/v1/completions"

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    COMPLETIONS: {"prompt": "hi"},
    "/v1/chat/completions/batch": {"messages": [HI]},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 5},
    "/v2/chat": {"messages": HI},
    "/api/chat": {"messages": HI, "stream": False},
    "/api/generate": {"prompt": "hi", "stream": False},
    "/generate": {"text": "hi"},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 5}},
    "/invocations": {"prompt": "hi"},
}


@pytest.mark.parametrize("path", ROUTES)
async def test_every_dialect_has_both(server: Server, path: str) -> None:
    body = ROUTES[path]
    for headers, more, limited in (({}, {}, False), ({SLO: "250.5"}, {"timeout": 5}, True)):
        async with server.http.post(path, json={**body, **more}, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
        job = server.engine.runs[-1].job
        assert (job.due > 0, job.deadline < inf) == (limited, limited)
    assert job.deadline - job.due == pytest.approx(4.7495, abs=1e-6)
    status, refused = await server.post(path, {**body, "timeout": 0})
    assert status == 400 and "'timeout' must be above 0 and at most 604800 seconds" in json.dumps(refused)
    async with server.http.post(path, json=body, headers={SLO: "soon"}) as answer:
        assert answer.status == 400 and SLO in await answer.text()


async def test_the_servers_limit_is_that_of_requests_without_their_own(start: Start) -> None:
    server = await start()
    loaded = server.service.loaded
    server.service.ready(msgspec.structs.replace(loaded, settings=ServeConfig(ttft_slo=100.0)))
    for headers, due in (({}, True), ({SLO: "0"}, False)):
        async with server.http.post(COMPLETIONS, json={"prompt": "hi"}, headers=headers) as answer:
            assert answer.status == 200
        assert (server.engine.runs[-1].job.due > 0) == due


@pytest.fixture
async def bench(tokenizer: Tokenizer) -> Bench:
    """A device that a test controls, with room for one request."""
    return Bench(tokenizer, eager=False, rows=1)


@pytest.fixture
async def real(start: Start, bench: Bench) -> Server:
    """A server with the real step loop."""
    server = await start()
    server.service.ready(msgspec.structs.replace(server.service.loaded, engine=bench.submitter))
    return server


@pytest.mark.parametrize("beams", [1, 2])
async def test_who_takes_too_long_gets_408_and_frees_everything(
    real: Server, bench: Bench, beams: int
) -> None:
    """One runs, one waits; the device never answers."""
    asked = {"prompt": "hi", "max_tokens": 5, "timeout": 0.05, "n": beams, "use_beam_search": beams > 1}
    answers = await asyncio.gather(*(real.post(COMPLETIONS, asked) for _ in range(2)))
    for status, answer in answers:
        assert status == 408
        assert (answer["error"]["type"], answer["error"]["code"]) == ("timeout_error", "request_timeout")
        assert "'timeout'" in answer["error"]["message"]
    assert bench.scheduler.running == 0 and bench.scheduler.statistics().waiting == 0
    async with real.http.post(COMPLETIONS, json=asked) as answer:
        assert answer.headers["x-should-retry"] == "false"
    bench.executor.complete(len(bench.executor.pending))
    await until(lambda: bench.submitter.idle)


async def test_a_stream_that_takes_too_long_ends_with_an_error(real: Server, bench: Bench) -> None:
    task = asyncio.create_task(
        real.events(COMPLETIONS, {"prompt": "hi", "max_tokens": 50, "timeout": 0.3, "stream": True})
    )
    await until(lambda: bool(bench.executor.pending))
    bench.executor.complete(2)
    *_, last = [event for event in await task if event != "[DONE]"]
    assert json.loads(last)["error"]["code"] == "request_timeout"
    assert bench.scheduler.running == 0


async def test_a_job_that_ends_in_time_is_left_alone(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    deadline = asyncio.get_running_loop().time() + 30.0
    run = await bench.start("a", 4, deadline=deadline)
    await run.wait()
    await settle()
    assert bench.reason("a-0") is FinishReason.LENGTH and bench.submitter.idle


async def test_who_could_not_have_the_first_token_in_time_gets_429_at_once(
    real: Server, bench: Bench
) -> None:
    waiting = [await bench.start(f"w{i}", 40, prompt=PROMPT) for i in range(3)]
    await until(lambda: bool(bench.executor.pending))
    await bench.complete()
    asked = {"prompt": "hi", "max_tokens": 1}
    async with real.http.post(COMPLETIONS, json=asked, headers={SLO: "0.001"}) as answer:
        assert answer.status == 429
        told = (await answer.json())["error"]
        assert (told["type"], told["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert int(answer.headers["Retry-After"]) >= 1 and int(answer.headers["retry-after-ms"]) >= 1000
    (told,) = bench.submitter.statistics()
    assert told.scheduler.refused == {"ttft_slo": 1}
    task = asyncio.create_task(real.post(COMPLETIONS, asked))
    await until(lambda: bench.scheduler.statistics().waiting == 3)
    for run in waiting:
        run.abort()
    while not task.done():
        await bench.complete()
    assert (await task)[0] == 200
