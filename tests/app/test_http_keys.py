"""Keys of a file, through the whole server: who may do what, and how much of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from app.api.routes import TABLE
from app.engine.job import Piece
from app.http.keys import KEYS
from app.service import Health, Phase
from app.text.tokenizer import Tokenizer
from core.adapters import AdapterLimits
from core.config import ServeConfig
from core.errors import Overloaded
from core.types import Finish, FinishReason
from tests.rigs.batches import Rig, line
from tests.rigs.metrics import samples
from tests.rigs.operator import Idle, NoAdapters
from tests.rigs.responses import STOP
from tests.rigs.scheduler import Clock
from tests.rigs.server import CARD, Server, Start, refuse
from tests.rigs.step_loop import Bench
from tests.rigs.wait import until

COMPLETIONS = "/v1/completions"
ASKED = {"prompt": [5, 6, 7, 8], "max_tokens": 3}
TEXT = """
    [keys.alice]
    key = "a"
    concurrency = 1
    tokens_per_minute = 60
    requests_per_minute = 6
    priority = 2
    models = ["tiny", "sql"]

    [keys.bob]
    key = "b"
    admin = true
    cache_salt = "team"

    [keys.carol]
    key = "c"
    cache_salt = "team"
"""
ALICE, BOB, CAROL = ({"Authorization": f"Bearer {key}"} for key in "abc")
GIVEN = {"X-Api-Key": "given"}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "keys.toml"
    made.touch(mode=0o600)
    made.write_text(TEXT)
    return made


@pytest.fixture
async def server(start: Start, file: Path, tmp_path: Path, clock: Clock) -> Server:
    serve = ServeConfig(
        api_keys_file=str(file), api_key=("given",), control_routes=True, data_dir=str(tmp_path)
    )
    server = await start(serve, clock=clock)
    card = msgspec.structs.replace(CARD, aliases=("tiny",))
    loaded = msgspec.structs.replace(server.service.loaded, card=card, operator=Idle(), adapters=NoAdapters())
    server.service.ready(loaded)
    return server


Answer = tuple[int, Any, dict[str, str]]


async def ask(server: Server, who: dict[str, str], path: str, body: Any = None, **sent: Any) -> Answer:
    """Status, body and headers, in lower case."""
    method = sent.pop("method", "GET" if body is None else "POST")
    async with server.http.request(method, path, headers=who, json=body, **sent) as response:
        raw = await response.read()
        told = json.loads(raw) if response.content_type == "application/json" else raw.decode()
        return response.status, told, {name.lower(): value for name, value in response.headers.items()}


def rates(headers: dict[str, str]) -> dict[str, str]:
    return {
        name.removeprefix("x-ratelimit-"): value
        for name, value in headers.items()
        if name.startswith("x-ratelimit-")
    }


async def counts(server: Server, who: str) -> dict[str, float]:
    """Counters of an API key in /metrics, by name."""
    _, text, _ = await ask(server, {}, "/metrics")
    return {
        name.removeprefix("loom_key_").removesuffix("_total"): value
        for (name, labels), value in samples(text).items()
        if name.startswith("loom_key_") and labels == {("key", who)}
    }


def running(server: Server) -> int:
    account = server.app[KEYS].find("a")
    assert account is not None
    return account.running


async def test_a_key_from_its_first_request_to_its_last(server: Server, clock: Clock, file: Path) -> None:
    # Nothing without a key, and with one what its table allows.
    for who in ({}, {"Authorization": "Bearer wrong"}):
        assert (await ask(server, who, "/v1/models"))[0] == 401
        assert (await ask(server, who, "/health"))[0] == 200
    status, told, headers = await ask(server, ALICE, COMPLETIONS, {**ASKED, "model": "tiny"})
    assert status == 200 and told["usage"]["total_tokens"] == 7
    assert rates(headers) == {
        "limit-requests": "6",
        "remaining-requests": "5",
        "reset-requests": "10s",
        "limit-tokens": "60",
        "remaining-tokens": "53",
        "reset-tokens": "7s",
    }
    job = server.engine.runs[-1].job
    assert job.priority == 2 and job.root.tenant == job.owner

    # A stream: prompt tokens are charged when it starts, output tokens when it ends.
    status, text, headers = await ask(server, ALICE, COMPLETIONS, {**ASKED, "stream": True})
    assert status == 200 and "[DONE]" in text
    assert (rates(headers)["remaining-requests"], rates(headers)["remaining-tokens"]) == ("4", "49")
    _, _, headers = await ask(server, ALICE, "/v1/models")
    assert (rates(headers)["remaining-requests"], rates(headers)["remaining-tokens"]) == ("4", "46")

    # Overdrawn by one long request: the next is refused before anything is queued.
    assert (await ask(server, ALICE, COMPLETIONS, {"prompt": [5] * 50, "max_tokens": 3}))[0] == 200
    ran = len(server.engine.runs)
    status, told, headers = await ask(server, ALICE, COMPLETIONS, ASKED)
    assert (status, told["error"]["code"], told["error"]["type"]) == (
        429,
        "rate_limit_exceeded",
        "rate_limit_error",
    )
    assert "60 tokens a minute. Try again in 8s." in told["error"]["message"]
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("8", "8000")
    assert rates(headers)["remaining-tokens"] == "0" and rates(headers)["reset-tokens"] == "1m7s"
    assert len(server.engine.runs) == ran and running(server) == 0
    clock.now += 8
    assert (await ask(server, ALICE, COMPLETIONS, ASKED))[0] == 200
    assert await counts(server, "alice") == {
        "requests": 4,
        "limited": 1,
        "prompt_tokens": 4 + 4 + 50 + 4,
        "output_tokens": 4 * 3,
    }
    assert await counts(server, "bob") == dict.fromkeys(
        ("requests", "limited", "prompt_tokens", "output_tokens"), 0
    )

    # Read again with other limits and another key, while a request runs.
    server.engine.manual = True
    asked = asyncio.create_task(ask(server, BOB, COMPLETIONS, ASKED))
    await until(lambda: len(server.engine.live) == 1)
    file.write_text('[keys.alice]\nkey = "a"\n[keys.dave]\nkey = "d"\n')
    server.app[KEYS].reload()
    server.engine.manual = False
    assert rates((await ask(server, ALICE, "/v1/models"))[2]) == {}
    assert (await ask(server, {"X-Api-Key": "d"}, COMPLETIONS, ASKED))[0] == 200
    assert (await ask(server, BOB, "/v1/models"))[0] == 401
    server.engine.runs[-2].push(0, Piece("x", [1], None, STOP))
    assert (await asked)[0] == 200
    assert await counts(server, "bob") == {} and (await counts(server, "dave"))["requests"] == 1


async def test_requests_a_minute_and_at_once(server: Server, clock: Clock) -> None:
    for _ in range(6):
        assert (await ask(server, ALICE, COMPLETIONS, {**ASKED, "max_tokens": 1}))[0] == 200
    status, told, headers = await ask(server, ALICE, COMPLETIONS, ASKED)
    assert status == 429 and "6 requests a minute. Try again in 10s." in told["error"]["message"]
    assert headers["retry-after"] == "10"
    for path in ("/v1/messages", "/v2/chat", "/api/chat"):  # in the shape of each
        assert (await ask(server, ALICE, path, {}))[0] == 429
    # What does not run the model has no limit.
    assert (await ask(server, ALICE, "/tokenize", {"prompt": "hi", "model": "tiny"}))[0] == 200
    clock.now += 60

    server.engine.manual = True
    first = asyncio.create_task(ask(server, ALICE, COMPLETIONS, {**ASKED, "rid": "first"}))
    await until(lambda: len(server.engine.live) == 1)
    status, told, headers = await ask(server, ALICE, COMPLETIONS, ASKED)
    assert status == 429 and "may run 1 request at once" in told["error"]["message"]
    assert headers["retry-after"] == "1" and len(server.engine.live) == 1
    assert (await ask(server, ALICE, "/abort_request", {"rid": "first"}))[0] == 200
    await first
    assert running(server) == 0


async def test_openais_client_waits_and_tries_again(server: Server, clock: Clock) -> None:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="a", max_retries=0) as client:
        await client.completions.create(model="tiny", prompt=[5] * 70, max_tokens=1)
        with pytest.raises(openai.RateLimitError) as refused:
            await client.completions.create(model="tiny", prompt=[5])
    assert refused.value.code == "rate_limit_exceeded"
    assert refused.value.response.headers["retry-after-ms"] == "12000"


# -- every way to end --------------------------------------------------------------------------------

End = Callable[[Server], Awaitable[None]]


async def done(server: Server) -> None:
    assert (await ask(server, ALICE, COMPLETIONS, ASKED))[0] == 200


async def done_stream(server: Server) -> None:
    assert (await ask(server, ALICE, COMPLETIONS, {**ASKED, "stream": True}))[0] == 200


async def bad_body(server: Server) -> None:
    assert (await ask(server, ALICE, COMPLETIONS, {"prompt": 1.5}))[0] == 400


async def not_queued(server: Server) -> None:
    refuse(server, Overloaded("The queue is full."))
    assert (await ask(server, ALICE, COMPLETIONS, ASKED))[0] == 429


async def failed(server: Server) -> None:
    server.engine.fail_at = 1
    assert (await ask(server, ALICE, COMPLETIONS, ASKED))[0] == 500
    server.engine.fail_at = -1


async def failed_stream(server: Server) -> None:
    server.engine.fail_at = 1
    status, text, _ = await ask(server, ALICE, COMPLETIONS, {**ASKED, "stream": True})
    assert status == 200 and "error" in text
    server.engine.fail_at = -1


async def unforeseen(server: Server) -> None:
    server.engine.refusal = ValueError("?")
    assert (await ask(server, ALICE, COMPLETIONS, ASKED))[0] == 500
    server.engine.refusal = None


async def aborted(server: Server) -> None:
    server.engine.manual = True
    asked = asyncio.create_task(ask(server, ALICE, COMPLETIONS, {**ASKED, "rid": "r"}))
    await until(lambda: len(server.engine.live) == 1)
    assert (await ask(server, ALICE, "/abort_request", {"rid": "r"}))[0] == 200
    await asked


async def gone(server: Server) -> None:
    server.engine.manual = True
    asked = asyncio.create_task(ask(server, ALICE, COMPLETIONS, ASKED))
    await until(lambda: len(server.engine.live) == 1)
    asked.cancel()
    await until(lambda: not server.engine.live)


async def gone_while_encoded(server: Server) -> None:
    server.engine.gate = asyncio.Event()
    asked = asyncio.create_task(ask(server, ALICE, COMPLETIONS, ASKED))
    await server.engine.started.wait()
    assert running(server) == 1
    asked.cancel()
    await until(lambda: running(server) == 0)
    server.engine.gate = None


async def gone_from_a_stream(server: Server) -> None:
    server.engine.manual = True
    response = await server.http.post(COMPLETIONS, json={**ASKED, "stream": True}, headers=ALICE)
    server.engine.runs[-1].push(0, Piece("x", [1]))
    response.close()
    await until(lambda: not server.engine.live)


async def background(server: Server) -> None:
    server.engine.manual = True
    body = {"input": "hi", "background": True, "model": "tiny"}
    status, made, _ = await ask(server, ALICE, "/v1/responses", body)
    assert (status, made["status"], running(server)) == (200, "in_progress", 1)
    assert (await ask(server, ALICE, COMPLETIONS, ASKED))[0] == 429, "it runs on after its answer"
    server.engine.runs[-1].push(0, Piece("x", [1], None, STOP))


async def background_cancelled(server: Server) -> None:
    server.engine.manual = True
    _, made, _ = await ask(server, ALICE, "/v1/responses", {"input": "hi", "background": True})
    status, told, _ = await ask(server, ALICE, f"/v1/responses/{made['id']}/cancel", method="POST")
    assert (status, told["status"]) == (200, "cancelled")


async def background_failed(server: Server) -> None:
    server.engine.manual = True
    await ask(server, ALICE, "/v1/responses", {"input": "hi", "background": True})
    server.engine.runs[-1].push(0, Piece("", [], None, Finish(FinishReason.ERROR, message="lost")))


async def background_follower_gone(server: Server) -> None:
    server.engine.manual = True
    body = {"input": "hi", "background": True, "stream": True}
    response = await server.http.post("/v1/responses", json=body, headers=ALICE)
    await response.content.readuntil(b"\n\n")
    response.close()
    server.engine.runs[-1].push(0, Piece("x", [1], None, STOP))


async def passed_on(server: Server) -> None:
    assert (await ask(server, ALICE, "/invocations", {**ASKED, "model": "tiny"}))[0] == 200
    assert (await counts(server, "alice"))["requests"] == 1


ENDS: tuple[End, ...] = (
    done,
    done_stream,
    bad_body,
    not_queued,
    failed,
    failed_stream,
    unforeseen,
    aborted,
    gone,
    gone_while_encoded,
    gone_from_a_stream,
    background,
    background_cancelled,
    background_failed,
    background_follower_gone,
    passed_on,
)


@pytest.mark.parametrize("end", ENDS, ids=[end.__name__ for end in ENDS])
async def test_a_request_that_has_ended_holds_no_place_and_has_paid(end: End, server: Server) -> None:
    await end(server)
    await until(lambda: running(server) == 0)
    used = sum(len(run.prompt) + run.output_tokens for run in server.engine.runs)
    left = rates((await ask(server, ALICE, "/v1/models"))[2])
    assert left["remaining-tokens"] == str(60 - used)
    assert left["remaining-requests"] == "5"
    server.engine.manual = False
    assert (await ask(server, ALICE, COMPLETIONS, ASKED))[0] == 200


# -- what a key may do -------------------------------------------------------------------------------


async def test_control_routes_need_an_admin(server: Server) -> None:
    guarded = [(route.method, route.path) for route in TABLE if route.facts.get("admin")]
    assert {path for _, path in guarded} >= {
        "/load_lora_adapter", "/v1/unload_lora_adapter", "/update_weights_from_disk", "/sleep", "/pause",
        "/flush_cache", "/configure_logging", "/start_profile",
    }  # fmt: skip
    for method, path in guarded:
        for who in (ALICE, CAROL):
            status, told, _ = await ask(server, who, path, method=method)
            assert (status, told["error"]["type"], told["error"]["code"]) == (
                403, "permission_error", "admin_key_required",
            )  # fmt: skip
            assert "admin = true" in told["error"]["message"]
        for who in (BOB, GIVEN):
            status, told, _ = await ask(server, who, path, {} if method == "POST" else None, method=method)
            assert status in (200, 400), (path, told)
    assert server.engine.flushed == 2 * 3


@pytest.fixture
async def adapted(server: Server, tokenizer: Tokenizer, tmp_path: Path) -> AsyncIterator[Server]:
    """A server with the adapters `sql` and `other`."""
    limits = AdapterLimits(places=2, max_rank=8, host=4)
    bench = Bench(tokenizer, adapters=limits, roots=(tmp_path,))
    server.service.ready(msgspec.structs.replace(server.service.loaded, adapters=bench.adapters))
    for name in ("sql", "other"):
        (tmp_path / name).mkdir()
        await bench.adapters.load(name, str(tmp_path / name))
    yield server
    bench.engine.close()


async def test_other_models_do_not_exist(adapted: Server) -> None:
    _, unknown, _ = await ask(adapted, ALICE, COMPLETIONS, {**ASKED, "model": "nothing"})
    for model in ("org/tiny", "other", "tiny:other", "org/tiny:other"):
        status, told, _ = await ask(adapted, BOB, COMPLETIONS, {**ASKED, "model": model})
        assert status == 200, told
        status, told, _ = await ask(adapted, ALICE, COMPLETIONS, {**ASKED, "model": model})
        message = unknown["error"]["message"].replace("nothing", model)
        assert (status, told["error"]) == (404, {**unknown["error"], "message": message})
        assert (await ask(adapted, ALICE, f"/v1/models/{model}"))[0] == 404
    status, told, _ = await ask(adapted, ALICE, COMPLETIONS, {**ASKED, "lora_path": "other"})
    assert (status, told["error"]["code"]) == (400, "model_not_found")

    _, told, _ = await ask(adapted, ALICE, "/v1/models")
    assert [each["id"] for each in told["data"]] == ["tiny", "sql"]
    _, told, _ = await ask(adapted, BOB, "/v1/models")
    assert [each["id"] for each in told["data"]] == ["org/tiny", "tiny", "sql", "other"]
    for path in ("/api/tags", "/api/ps"):
        assert [each["name"] for each in (await ask(adapted, ALICE, path))[1]["models"]] == ["tiny"]


async def test_a_key_of_adapters_alone(adapted: Server, file: Path) -> None:
    file.write_text('[keys.alice]\nkey = "a"\nmodels = ["sql"]\n[keys.carol]\nkey = "c"\nmodels = []\n')
    adapted.app[KEYS].reload()
    for fields, expected in (
        ({"model": "sql"}, 200), ({"model": "tiny:sql"}, 200), ({"lora_path": "sql"}, 200),
        ({}, 404), ({"model": "default"}, 404), ({"model": "tiny"}, 404),
    ):  # fmt: skip
        status, told, _ = await ask(adapted, ALICE, COMPLETIONS, {**ASKED, **fields})
        assert status == expected, (fields, told)
    who = {**CAROL, "Anthropic-Version": "2023-06-01"}
    status, told, _ = await ask(adapted, who, "/v1/models")
    assert (status, told["data"], told["first_id"], told["last_id"]) == (200, [], None, None)
    assert (await ask(adapted, CAROL, "/health_generate"))[0] == 200


async def test_no_request_is_more_urgent_than_its_key_may_be(server: Server) -> None:
    for who, sent, expected in (
        (ALICE, None, 2), (ALICE, -7, -7), (ALICE, 2, 2), (BOB, None, 0), (GIVEN, None, 0), (GIVEN, 9, 9),
    ):  # fmt: skip
        status, told, _ = await ask(server, who, COMPLETIONS, {**ASKED, "priority": sent, "model": "tiny"})
        assert status == 200, told
        assert server.engine.runs[-1].job.priority == expected
    for who, sent, most in ((ALICE, 3, 2), (BOB, 1, 0)):
        status, told, _ = await ask(server, who, COMPLETIONS, {**ASKED, "priority": sent})
        assert (status, told["error"]["param"]) == (400, "priority")
        assert f"at most {most} " in told["error"]["message"]


async def test_keys_of_one_salt_share_prefixes_and_nothing_else(server: Server) -> None:
    server.engine.manual = True
    body = {**ASKED, "rid": "same", "stream": True}
    async with (
        server.http.post(COMPLETIONS, json=body, headers=BOB),
        server.http.post(COMPLETIONS, json=body, headers=CAROL),
        server.http.post(COMPLETIONS, json=body, headers=ALICE),
        server.http.post(COMPLETIONS, json=body, headers=GIVEN),
    ):
        bob, carol, alice, given = (run.job for run in server.engine.runs)
        assert bob.root == carol.root and bob.owner != carol.owner
        assert len({bob.root, alice.root, given.root}) == 3
        _, told, _ = await ask(server, CAROL, "/abort_request", {"abort_all": True})
        assert told["aborted"] == 1 and not server.engine.runs[0].aborted and server.engine.runs[1].aborted
        server.engine.abort_all()


# -- batches -----------------------------------------------------------------------------------------


async def test_a_batch_is_counted_to_its_key_and_has_no_limits_but_models(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    text = '[keys.alice]\nkey = "one"\ntokens_per_minute = 1\nconcurrency = 1\n'
    file.write_text(text)
    async with Rig(tmp_path, keys=("given",), keys_file=str(file)) as rig:
        rig.client = rig.client.with_options(api_key="one")
        batch = await rig.ended((await rig.submit([line("a"), line("b")])).id)
        assert batch.request_counts and batch.request_counts.completed == 2
        account = rig.app[KEYS].find("one")
        assert account is not None and account.prompt_tokens > 0 and account.output_tokens > 0
        assert (account.requests, account.running) == (0, 0)
        assert dict(account.headers())["x-ratelimit-remaining-tokens"] == "1"

        file.write_text(text + "models = ['other']")
        rig.app[KEYS].reload()
        batch = await rig.ended((await rig.submit([line("c")])).id)
        assert batch.request_counts and batch.request_counts.failed == 1
        assert "model_not_found" in json.dumps(await rig.records(batch.error_file_id))


async def test_a_server_that_cannot_answer_counts_no_requests(server: Server) -> None:
    server.service.health = Health(Phase.FAILED, "failed", 1.0, "the engine failed")
    for _ in range(7):  # alice has six a minute
        assert (await ask(server, ALICE, COMPLETIONS, ASKED))[0] == 503
    assert await counts(server, "alice") == {
        "requests": 0.0, "limited": 0.0, "prompt_tokens": 0.0, "output_tokens": 0.0
    }  # fmt: skip
