"""Adapters over HTTP: how they are loaded, named, listed and counted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from app.text.tokenizer import Tokenizer
from core.adapters import AdapterLimits
from core.config import ServeConfig
from tests.rigs.metrics import samples
from tests.rigs.server import Server, Start, know
from tests.rigs.step_loop import Bench

HI = [{"role": "user", "content": "hi"}]
LIMITS = AdapterLimits(places=2, max_rank=8, host=4)


@pytest.fixture
async def adapted(start: Start, tokenizer: Tokenizer, root: Path) -> AsyncIterator[Server]:
    """A server with the adapters `a` and `b`."""
    server = await start()
    know(server)
    bench = Bench(tokenizer, adapters=LIMITS, roots=(root,))
    loaded = server.service.loaded
    server.service.ready(msgspec.structs.replace(loaded, adapters=bench.adapters))
    for name in "ab":
        await bench.adapters.load(name, str(root / name))
    yield server
    bench.engine.close()


def adapter_of(server: Server) -> str | None:
    """The name of the adapter that the last job had."""
    adapters = server.service.loaded.adapters
    assert adapters is not None
    return next(iter(adapters.names([server.engine.runs[-1].job.root.adapter])), None)


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 4},
    "/v2/chat": {"messages": HI},
    "/api/chat": {"messages": HI, "stream": False},
    "/api/generate": {"prompt": "hi", "stream": False},
    "/v1/embeddings": {"input": "hi"},
    "/inference/v1/generate": {"token_ids": [1, 2]},
    "/v1/chat/completions/batch": {"messages": [HI]},
    "/v1/score": {"query": "a", "items": ["b"], "label_token_ids": [1]},
    "/invocations": {"prompt": "hi"},
}


@pytest.mark.parametrize("path", BODIES)
async def test_every_dialect_selects_by_model(adapted: Server, path: str) -> None:
    for model, name in (("a", "a"), ("org/tiny:b", "b"), ("default:a", "a"), ("org/tiny", None)):
        answer = await adapted.ask(path, {**BODIES[path], "model": model})
        assert adapter_of(adapted) == name
    for model in ("c", "org/tiny:c", "other:a", "org/tiny:", ":a", "a:a"):
        status, answer = await adapted.post(path, {**BODIES[path], "model": model})
        assert status == 404, (model, answer)


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
)
async def test_lora_path_selects_too(adapted: Server, path: str) -> None:
    body = BODIES[path]
    for fields, name in (({}, "a"), ({"model": "org/tiny"}, "a"), ({"model": "a"}, "a")):
        await adapted.ask(path, {**body, **fields, "lora_path": "a"})
        assert adapter_of(adapted) == name
    for fields in ({"lora_path": "c"}, {"lora_path": "a", "model": "b"}, {"lora_path": 5}):
        assert (await adapted.refused(path, {**body, **fields}))["param"] == "lora_path"


async def test_generate_takes_an_adapter_for_each_prompt(adapted: Server) -> None:
    answer = await adapted.ask("/generate", {"text": ["x", "y", "z"], "lora_path": ["a", None, "b"]})
    names = adapted.service.loaded.adapters.names
    assert [names([run.job.root.adapter]) for run in adapted.engine.runs] == [["a"], [], ["b"]]
    await adapted.post("/generate", {"text": "x", "lora_path": "b"})
    assert adapter_of(adapted) == "b"
    for wrong in (["a"], ["a", "b", "c"], "c", [1, 2, 3]):
        body = {"text": ["x", "y", "z"], "lora_path": wrong}
        status, answer = await adapted.post("/generate", body)
        assert (status, answer["error"]["param"].partition("[")[0]) == (400, "lora_path")
    body = {"text": "x", "sampling_params": {"lora_path": "a"}}
    assert (await adapted.refused("/generate", body))["param"] == "sampling_params.lora_path"


async def test_answers_name_the_adapter(adapted: Server) -> None:
    for model in ("a", "org/tiny:a"):
        _, answer = await adapted.post("/v1/chat/completions", {"messages": HI, "model": model})
        assert answer["model"] == "a"
    events = await adapted.events("/v1/chat/completions", {"messages": HI, "model": "a", "stream": True})
    assert '"model":"a"' in events[0]


async def test_adapters_are_listed(adapted: Server) -> None:
    listed = (await adapted.get("/v1/models"))["data"]
    assert [(each["id"], each["parent"]) for each in listed] == [
        ("org/tiny", None), ("a", "org/tiny"), ("b", "org/tiny"),
    ]  # fmt: skip
    for name in ("a", "org/tiny:a"):
        answer = await adapted.get(f"/v1/models/{name}")
        assert (answer["id"], answer["parent"]) == ("a", "org/tiny")
    async with adapted.http.get("/v1/models/c") as response:
        assert response.status == 404


async def test_loading_after_sglang(adapted: Server, root: Path) -> None:
    body = {"lora_name": "c", "lora_path": str(root / "a"), "pinned": False}
    status, answer = await adapted.post("/load_lora_adapter", body)
    paths = {"a": str(root / "a"), "b": str(root / "b"), "c": str(root / "a")}
    assert (status, answer) == (200, {"success": True, "loaded_adapters": paths})
    status, answer = await adapted.post("/unload_lora_adapter", {"lora_name": "c"})
    del paths["c"]
    assert (status, answer["loaded_adapters"]) == (200, paths)
    status, _ = await adapted.post("/unload_lora_adapter", {"lora_name": "c"})
    assert status == 404


async def test_with_a_key_no_path_is_told(start: Start, tokenizer: Tokenizer, root: Path) -> None:
    server = await start(ServeConfig(api_key=("one",)))
    bench = Bench(tokenizer, adapters=LIMITS, roots=(root,))
    server.service.ready(msgspec.structs.replace(server.service.loaded, adapters=bench.adapters))
    await bench.adapters.load("a", str(root / "a"))
    body = {"lora_name": "b", "lora_path": str(root / "b")}
    headers = {"Authorization": "Bearer one"}
    async with server.http.post("/load_lora_adapter", json=body, headers=headers) as response:
        assert response.status == 200
        assert (await response.json())["loaded_adapters"] == {"a": "a", "b": "b"}
    async with server.http.post("/load_lora_adapter", json=body) as response:
        assert response.status == 401
    bench.engine.close()


async def test_loading_after_vllm(adapted: Server, root: Path) -> None:
    for action, body in (
        ("added", {"lora_name": "c", "lora_path": str(root / "a")}),
        ("removed", {"lora_name": "c", "lora_int_id": 3}),
    ):
        verb = "load" if action == "added" else "unload"
        async with adapted.http.post(f"/v1/{verb}_lora_adapter", json=body) as response:
            assert response.status == 200
            assert await response.text() == f"Success: LoRA adapter 'c' {action} successfully."


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "lora_name"),
        ({"lora_name": "c"}, "lora_path"),
        ({"lora_name": "c:d", "lora_path": "/"}, "lora_name"),
        ({"lora_name": "c", "lora_path": "/"}, "lora_path"),
        ({"lora_name": "c", "lora_path": "../../etc"}, "lora_path"),
        ({"lora_name": "a", "lora_path": "/"}, "lora_name"),
        ({"lora_name": "default", "lora_path": "/"}, "lora_name"),
        ({"lora_name": 5, "lora_path": "/"}, "lora_name"),
    ],
)
async def test_what_is_wrong_with_loading(adapted: Server, body: dict[str, Any], param: str) -> None:
    for path in ("/load_lora_adapter", "/v1/load_lora_adapter"):
        assert (await adapted.refused(path, body))["param"] == param


async def test_without_adapters_the_flag_is_named(start: Start, tokenizer: Tokenizer) -> None:
    server = await start()
    bench = Bench(tokenizer)
    server.service.ready(msgspec.structs.replace(server.service.loaded, adapters=bench.adapters))
    for path in ("/load_lora_adapter", "/v1/load_lora_adapter"):
        status, answer = await server.post(path, {"lora_name": "a", "lora_path": "/a"})
        assert status == 400 and "--enable-lora" in answer["error"]["message"]
    status, answer = await server.post("/v1/completions", {"prompt": "x", "lora_path": "a"})
    assert status == 400 and "--enable-lora" in answer["error"]["message"]
    async with server.http.get("/metrics") as response:
        named = {name for name, _ in samples(await response.text())}
        assert not [name for name in named if "lora" in name or "adapter" in name]


async def test_metrics_name_running_and_waiting_adapters(adapted: Server) -> None:
    lines = (await adapted.text("/metrics")).splitlines()
    info = next(line for line in lines if line.startswith("vllm:lora_requests_info{"))
    assert 'max_lora="2"' in info and 'running_lora_adapters=""' in info
    assert "loom_adapters_loaded" in "\n".join(lines)
    adapters = adapted.service.loaded.adapters
    assert adapters is not None
    ids = [each.id for each in adapters.listed]
    assert adapters.names(ids) == ["a", "b"]
