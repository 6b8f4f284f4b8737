"""Two keys, two tenants: what one stored, opened or runs does not exist for the other."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from app.api.routes import TABLE
from app.api.sglang.session_tree import MAX_SESSIONS
from app.batch.store import Disk
from app.http.tenant import Keys
from app.server import public_settings
from core.config import CacheConfig, Config, ModelConfig, ServeConfig
from core.errors import ConfigError
from core.request import Request
from tests.rigs.batches import Rig, line
from tests.rigs.server import Server, Start
from tests.rigs.wait import until

ONE, TWO = {"Authorization": "Bearer one"}, {"X-Api-Key": "two"}
CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}\n'


@pytest.fixture
async def keyed(start: Start, tmp_path: Path) -> Server:
    return await start(ServeConfig(api_key=("one", "two"), data_dir=str(tmp_path)))


def form(data: bytes) -> aiohttp.FormData:
    made = aiohttp.FormData({"purpose": "batch"})
    made.add_field("file", data, filename="in.jsonl")
    return made


async def ask(server: Server, who: dict[str, str], method: str, path: str, **sent: Any) -> tuple[int, Any]:
    async with server.http.request(method, path, headers=who, **sent) as response:
        told = await response.read()
        return response.status, (
            await response.json()
        ) if response.content_type == "application/json" else told


async def ids(server: Server, who: dict[str, str]) -> dict[str, str]:
    """Something of each kind that has an id, made by `who`, by the route's first word."""
    _, file = await ask(server, who, "POST", "/v1/files", data=form(LINE))
    order = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    status, batch = await ask(server, who, "POST", "/v1/batches", json=order)
    assert status == 200, batch
    _, response = await ask(server, who, "POST", "/v1/responses", json={"input": "hi"})
    return {"files": file["id"], "batches": batch["id"], "responses": response["id"]}


def routes(ids: dict[str, str]) -> list[tuple[str, str]]:
    """Every route of the table that takes the id of something stored."""
    found = []
    for method, path in ((route.method, route.path) for route in TABLE):
        kind = path.split("/")[2] if path.startswith("/v1/") else ""
        if "{id}" in path and kind in ids:
            found.append((method, path.replace("{id}", ids[kind])))
    assert len(found) >= 9
    return found


async def test_what_is_anothers_is_not_there(keyed: Server) -> None:
    made = await ids(keyed, ONE)
    unknown = {kind: id[:-8] + "00000000" for kind, id in made.items()}
    for (method, path), (_, nowhere) in zip(routes(made), routes(unknown), strict=True):
        status, told = await ask(keyed, TWO, method, path)
        assert status == 404, (method, path, told)
        expected = await ask(keyed, ONE, method, nowhere)
        assert (status, told["error"]["code"]) == (expected[0], expected[1]["error"]["code"])
    for path in ("/v1/files", "/v1/batches"):
        assert (await ask(keyed, TWO, "GET", path))[1]["data"] == []
        assert len((await ask(keyed, ONE, "GET", path))[1]["data"]) == 1
        status, told = await ask(keyed, TWO, "GET", f"{path}?after={made[path.split('/')[2]]}")
        assert status == 400 and told["error"]["param"] == "after"
    order = {"input_file_id": made["files"], "endpoint": "/v1/completions", "completion_window": "24h"}
    assert (await ask(keyed, TWO, "POST", "/v1/batches", json=order))[0] == 404
    follow = {"input": "and?", "previous_response_id": made["responses"]}
    status, told = await ask(keyed, TWO, "POST", "/v1/responses", json=follow)
    assert (status, told["error"]["code"]) == (400, "previous_response_not_found")
    for method, path in routes(made):
        if method == "GET":
            assert (await ask(keyed, ONE, method, path))[0] in (200, 404 if "content" in path else 200)


async def test_a_request_is_ended_and_looked_up_by_its_own_tenant(keyed: Server) -> None:
    keyed.engine.manual = True
    body = {**HI, "rid": "same", "stream": True}
    async with keyed.http.post(CHAT, json=body, headers=ONE), keyed.http.post(CHAT, json=body, headers=TWO):
        await until(lambda: len(keyed.engine.live) == 2)  # the same id, twice
        assert (await ask(keyed, ONE, "POST", CHAT, json={**HI, "rid": "same"}))[0] == 400
        first, second = keyed.engine.runs
        assert first.job.root.tenant != second.job.root.tenant
        assert (await ask(keyed, TWO, "POST", "/abort_request", json={"rid": "same"}))[0] == 200
        assert (first.aborted, second.aborted) == (False, True)
        status, told = await ask(keyed, TWO, "POST", "/abort_request", json={"rid": "same"})
        assert (status, told["error"]["code"]) == (404, "request_not_found")
        assert (await ask(keyed, TWO, "POST", "/abort_requests", json={"request_ids": ["same"]}))[1][
            "aborted"
        ] == 0
        assert (await ask(keyed, TWO, "POST", "/abort_request", json={"abort_all": True}))[1]["aborted"] == 0
        assert not first.aborted
        assert (await ask(keyed, ONE, "POST", "/abort_request", json={"abort_all": True}))[1]["aborted"] == 1
    assert (await ask(keyed, TWO, "GET", "/debug/requests/known"))[0] == 404


async def test_sessions_are_a_tenants_own_and_each_has_its_share(keyed: Server) -> None:
    assert (await ask(keyed, ONE, "POST", "/open_session", json={"session_id": "s"}))[0] == 200
    turn = {"text": "x", "session_params": {"id": "s"}}
    assert (await ask(keyed, ONE, "POST", "/generate", json=turn))[0] == 200
    status, told = await ask(keyed, TWO, "POST", "/generate", json=turn)
    assert (status, told["error"]["code"]) == (404, "session_not_found")
    assert (await ask(keyed, TWO, "POST", "/close_session", json={"session_id": "s"}))[1] == {
        "success": False
    }
    assert (await ask(keyed, TWO, "POST", "/open_session", json={"session_id": "s"}))[0] == 200
    for _ in range(MAX_SESSIONS // 2 - 1):
        assert (await ask(keyed, TWO, "POST", "/open_session"))[0] == 200
    assert (await ask(keyed, TWO, "POST", "/open_session"))[0] == 429
    assert (await ask(keyed, ONE, "POST", "/open_session"))[0] == 200


GENERATES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, HI),
    ("/v1/completions", {"prompt": "hi"}),
    ("/generate", {"text": "hi"}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/messages", {**HI, "max_tokens": 2}),
    ("/v2/chat", HI),
    ("/api/chat", {**HI, "stream": False}),
    ("/inference/v1/generate", {"token_ids": [5]}),
    ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [5]}),
    ("/v1/embeddings", {"input": "a"}),
]


@pytest.mark.parametrize(("path", "body"), GENERATES, ids=[path for path, _ in GENERATES])
async def test_no_prefix_is_shared_between_tenants(keyed: Server, path: str, body: dict[str, Any]) -> None:
    roots = []
    for who, more in (
        (ONE, {}),
        (TWO, {}),
        (ONE, {}),
        (ONE, {"cache_salt": "s"}),
        (TWO, {"cache_salt": "s"}),
    ):
        status, told = await ask(keyed, who, "POST", path, json={**body, **more})
        assert status == 200, told
        roots.append(keyed.engine.runs[-1].job.root)
    assert roots[0] == roots[2] and roots[0] != roots[1] and roots[3].tenant != roots[4].tenant


async def test_a_batch_runs_for_its_tenant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Rig(tmp_path, keys=("one", "two")) as rig:
        ran: list[Request] = []
        add = rig.scheduler.add
        monkeypatch.setattr(rig.scheduler, "add", lambda listed: (ran.extend(listed), add(listed)))
        batch = await rig.ended((await rig.submit([line("a")])).id)
        assert batch.status == "completed" and len(await rig.records(batch.output_file_id)) == 1
        assert [request.root.tenant for request in ran] == Keys(["one"]).tenants
        other = rig.client.with_options(api_key="two")
        for hidden in (batch.output_file_id, batch.input_file_id):
            with pytest.raises(openai.NotFoundError):
                await other.files.content(str(hidden))


async def test_without_keys_there_is_one_tenant_whatever_is_sent(start: Start, tmp_path: Path) -> None:
    server = await start(ServeConfig(data_dir=str(tmp_path)))
    made = await ids(server, ONE)
    for who in (TWO, {"Authorization": "Bearer x"}, {}):
        for method, path in routes(made):
            if method == "GET" and "content" not in path:
                assert (await ask(server, who, method, path))[0] == 200
    assert {run.job.root.tenant for run in server.engine.runs} == {""}


async def test_a_directory_from_before_there_were_owners(tmp_path: Path) -> None:
    first = Disk(tmp_path)
    first.close()
    with sqlite3.connect(tmp_path / "store.sqlite") as db:
        for table in ("files", "batches"):
            db.execute(f"ALTER TABLE {table} DROP COLUMN owner")
    disk = Disk(tmp_path)
    assert disk.count_active() == 0 and disk.next_batch() is None
    disk.close()


# -- what clients learn of the machine -------------------------------------------------------------


async def test_no_path_of_the_server_is_told(keyed: Server) -> None:
    path = keyed.service.loaded.card.path
    assert path.startswith("/")
    for route in ("/v1/models", "/server_info", "/model_info", "/get_model_info", "/api/tags", "/metrics"):
        async with keyed.http.get(route, headers=ONE) as response:
            assert response.status == 200 and path not in await response.text(), route


def test_settings_that_are_told_name_no_path_and_no_host() -> None:
    places = {"model": "/srv/models/tiny", "tokenizer": "/srv/tok", "chat_template": "/srv/t.jinja"}
    told = public_settings(
        Config(model=ModelConfig(**places), serve=ServeConfig(api_key=("k",), data_dir="/srv/data"))
    )
    assert "/srv" not in str(told) and "api_key" not in str(told)
    assert told["model"]["model"] == "tiny"  # type: ignore[index]
    events = '{"endpoint": "tcp://router.internal:5557"}'
    assert "router" not in str(public_settings(Config(cache=CacheConfig(kv_events_config=events))))
    for name in ("", "org/name"):
        assert public_settings(Config(model=ModelConfig(model=name)))["model"]["model"] == name  # type: ignore[index]


async def test_a_disk_that_refuses_is_not_named(start: Start, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--data-dir"):
        await start(ServeConfig(data_dir=str(Path(__file__) / "data")))
    server = await start(ServeConfig(data_dir=str(tmp_path / "file" / "data")))
    (tmp_path / "file").write_text("")
    for method, route in (("GET", "/v1/files"), ("GET", "/v1/batches"), ("GET", "/v1/responses/resp_0")):
        status, told = await ask(server, {}, method, route)
        assert status == 503 and str(tmp_path) not in str(told), told


# -- keys ------------------------------------------------------------------------------------------


def test_keys() -> None:
    keys = Keys(["one", "two", "two", ""])
    assert len(keys.tenants) == 2
    assert [found(keys, key) for key in ("one", "two")] == keys.tenants
    assert [keys.find(key) for key in ("", "on", "one ", "\udcff")] == [None] * 4
    assert found(Keys(["two"]), "two") == found(keys, "two")  # whatever the others are, and after a restart
    none = Keys([])
    assert none.tenants == [""] and found(none, "anything") == ""


def found(keys: Keys, key: str) -> str:
    account = keys.find(key)
    assert account is not None
    return account.terms.tenant
