"""Requests that name the replica that is to take them."""

from __future__ import annotations

import re

import msgspec
import pytest

from tests.rigs.metrics import samples
from tests.rigs.server import Server

HEADER = "x-data-parallel-rank"
BODIES = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/embeddings": {"input": "hi"},
    "/invocations": {"prompt": "hi"},
    "/api/generate": {"model": "org/tiny", "prompt": "hi", "stream": False},
    "/generate": {"text": "hi"},
}
FIELDS = ("routed_dp_rank", "data_parallel_rank")


async def send(server: Server, path: str, body: object, **headers: str) -> int:
    async with server.http.post(path, json=body, headers=headers) as answer:
        await answer.read()
        return answer.status


@pytest.mark.parametrize("path", BODIES)
async def test_the_header_of_every_route(server: Server, path: str) -> None:
    for spelt, rank in ((HEADER, "1"), ("X-data-parallel-rank", "0")):
        assert await send(server, path, BODIES[path], **{spelt: rank}) == 200
        assert server.engine.runs[-1].job.replica == int(rank)
    assert await send(server, path, BODIES[path]) == 200
    assert server.engine.runs[-1].job.replica is None


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("field", FIELDS)
async def test_a_field_goes_before_the_header(server: Server, path: str, field: str) -> None:
    assert await send(server, path, {**BODIES[path], field: 2}, **{HEADER: "1"}) == 200
    assert server.engine.runs[-1].job.replica == 2
    assert await send(server, path, {**BODIES[path], field: None}, **{HEADER: "1"}) == 200
    assert server.engine.runs[-1].job.replica == 1


@pytest.mark.parametrize("sent", ["one", "-1", "1.0", "", "1" * 5000])
async def test_what_is_no_number_is_refused(server: Server, sent: str) -> None:
    async with server.http.post("/v1/completions", json={"prompt": "hi"}, headers={HEADER: sent}) as answer:
        error = (await answer.json())["error"]
    assert answer.status == 400 and not server.engine.runs
    assert error["type"] == "invalid_request_error" and error["param"].lower() == HEADER


# -- figures ---------------------------------------------------------------------------------------------


@pytest.fixture
def two(server: Server) -> Server:
    """A server with the statistics of two replicas, the second with more waiting requests."""
    (first,) = server.engine.statistics()
    scheduler = msgspec.structs.replace(first.scheduler, waiting=3)
    second = msgspec.structs.replace(first, scheduler=scheduler, finished={"abort": 5})
    server.engine.statistics = lambda: [first, second]  # type: ignore[method-assign]
    return server


async def test_metrics_have_a_label_for_each_replica(two: Server) -> None:
    text = await two.text("/metrics")
    values = samples(text)  # a sample appears once
    described = re.findall(r"^# TYPE (\S+) ", text, re.M)
    assert len(described) == len(set(described))

    def of(name: str, **labels: str) -> list[float]:
        model = {"model_name": "org/tiny", **labels}
        return [values[name, frozenset({**model, "engine": str(replica)}.items())] for replica in (0, 1)]

    assert of("loom_requests_waiting") == of("vllm:num_requests_waiting") == [2, 3]
    assert of("loom_requests_finished_total", finished_reason="abort") == [1, 5]
    assert of("loom_time_to_first_token_seconds_count") == [6, 6]
    assert values["loom_ready", frozenset()] == 1


async def test_loads_have_an_entry_for_each_replica(two: Server) -> None:
    assert await two.get("/load") == {"server_load": 5}
    loads = await two.get("/get_load")
    assert [(each["dp_rank"], each["num_waiting_reqs"]) for each in loads] == [(0, 2), (1, 3)]
    told = await two.get("/v1/loads")
    assert told["dp_rank_count"] == 2 and [each["dp_rank"] for each in told["loads"]] == [0, 1]
    info = await two.get("/server_info")
    assert len(info["internal_states"]) == 2 and info["max_total_num_tokens"] == 3200
