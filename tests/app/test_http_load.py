"""How busy: the same figures under three names, and the aliases that probes and benches ask for."""

from __future__ import annotations

import pytest

from tests.rigs.server import Server

EXPECTED = {
    "/load": {"server_load": 2},
    "/get_load": [{"dp_rank": 0, "num_reqs": 2, "num_waiting_reqs": 2, "num_tokens": 25 * 16 + 64}],
}


@pytest.mark.parametrize("path", EXPECTED)
async def test_load(server: Server, path: str) -> None:
    async with server.http.get(path) as answer:
        assert (answer.status, await answer.json()) == (200, EXPECTED[path])


async def test_loads(server: Server) -> None:
    told = await server.get("/v1/loads?include=all")
    assert told["dp_rank_count"] == 1
    (entry,) = told["loads"]
    assert (entry["num_used_tokens"], entry["max_total_num_tokens"], entry["token_usage"]) == (
        400,
        1600,
        0.25,
    )
    assert (entry["num_running_reqs"], entry["num_waiting_reqs"]) == (0, 2)


async def test_aliases_of_probes_and_benches(server: Server) -> None:
    async with server.http.get("/ping") as answer:
        assert (answer.status, await answer.json()) == (200, {"status": "ok"})
    assert (await server.post("/reset_prefix_cache", {}))[0] == 200
    assert server.engine.flushed == 1
