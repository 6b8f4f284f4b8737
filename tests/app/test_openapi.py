"""`/openapi.json` describes every route, and the server keeps to it."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from app.api.routes import TABLE
from app.service import ModelCard
from core.config import ServeConfig
from core.models import PoolingSpec
from tests.rigs.operator import NoAdapters, make_loaded
from tests.rigs.server import CARD, Server, Start

NOT_GENERATING = ("/v1/rerank", "/rerank", "/v2/rerank", "/v1/classify", "/classify")
RANKS = PoolingSpec(kind="first", labels=("r",), activation="sigmoid", normalize=False)

EXAMPLES = 3
"""Examples for each operation and mode; all of them together take some 5 s."""


async def get(server: Server) -> dict[str, Any]:
    async with server.http.get("/openapi.json") as answer:
        assert answer.status == 200
        assert answer.content_type == "application/json"
        return await answer.json()


async def test_every_route_is_described(server: Server) -> None:
    told = await get(server)
    targets = [(route.method, route.path) for route in TABLE]
    described = {(method.upper(), path) for path, item in told["paths"].items() for method in item}
    assert described == {(method, re.sub(r"{(\w+):[^}]*}", r"{\1}", path)) for method, path in targets}
    assert all(operation["summary"] for item in told["paths"].values() for operation in item.values())


def test_every_route_says_what_it_answers() -> None:
    silent = [route.path for route in TABLE if not {"has", "lists", "string", "media"} & set(route.facts)]
    assert silent == []


def test_every_route_of_the_server_is_in_the_table(server: Server) -> None:
    served = [(route.method, route.handler) for route in server.app.router.routes()]
    assert served == [(route.method, route.handler) for route in TABLE]


async def test_names_of_operations_are_unique(server: Server) -> None:
    told = await get(server)
    names = [operation["operationId"] for item in told["paths"].values() for operation in item.values()]
    assert len(set(names)) == len(names)


async def test_bodies_are_the_structs(server: Server) -> None:
    schemas = (await get(server))["components"]["schemas"]
    chat = schemas["ChatBody"]
    assert chat["required"] == ["messages"]
    assert chat["properties"]["messages"]["type"] == "array"
    assert {"temperature", "top_k", "stream_options", "tools"} <= set(chat["properties"])


async def test_streams_are_events(server: Server) -> None:
    told = await get(server)
    streaming = {
        path
        for path, item in told["paths"].items()
        for operation in item.values()
        if "text/event-stream" in operation["responses"].get("200", {}).get("content", {})
    }
    assert streaming == {
        "/v1/chat/completions",
        "/v1/completions",
        "/generate",
        "/invocations",
        "/inference/v1/generate",
        "/v1/responses",
        "/v1/responses/{id}",
        "/v1/messages",
        "/v2/chat",
        "/cohere/v2/chat",
    }


async def test_keys_are_told_of_where_they_are_asked_for(start: Start) -> None:
    assert "security" not in await get(await start())
    keyed = await start(ServeConfig(api_key=("k",)))
    told = await keyed.get("/openapi.json", headers={"Authorization": "Bearer k"})
    assert told["security"] == [{"bearer": []}, {"key": []}]
    assert told["paths"]["/health"]["get"]["security"] == []
    assert "401" not in told["paths"]["/health"]["get"]["responses"]
    assert "401" in told["paths"]["/ping"]["get"]["responses"]


@pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason="needs schemathesis")
class TestAgainstTheServer:
    """schemathesis: no 5xx, no status, type or shape that is not described, nothing taken that is said to
    be refused."""

    async def test_whatever_is_sent(self, start: Start) -> None:
        problems = await attacked(start, attack)
        assert problems == []

    async def test_what_works_answers_as_described(self, start: Start) -> None:
        """Every route once with what it takes: random requests seldom get that far."""
        problems = await attacked(start, visit)
        assert problems == []

    async def test_what_needs_another_model_answers_with_that(self, start: Start) -> None:
        problems = await attacked(
            start, visit_ranks, msgspec.structs.replace(CARD, task="classify", pooling=RANKS)
        )
        assert problems == []


def visit_ranks(told: dict[str, Any], url: str, session: Any) -> list[str]:
    """Visit the operations that `visit` left out."""
    import schemathesis

    found: list[str] = []
    for operation in (result.ok() for result in schemathesis.openapi.from_dict(told).get_all_operations()):
        if operation.path in NOT_GENERATING:
            content = told["paths"][operation.path]["post"]["requestBody"]["content"]["application/json"]
            case = operation.Case(body=content["example"], media_type="application/json")
            if (status := checked(case, url, session, found).status_code) != 200:
                found.append(f"{operation.label}: {status}")
    return found


async def attacked(
    start: Start, how: Callable[[Any, str, Any], list[str]], card: ModelCard = CARD
) -> list[str]:
    import requests

    server = await start(ServeConfig(control_routes=True))
    loaded = server.service.loaded
    server.engine.head = lambda prompt, pair: [0.5]
    made = make_loaded(card, loaded.tokenizer, loaded.template, server.engine)
    server.service.ready(msgspec.structs.replace(made, adapters=NoAdapters()))
    told = await get(server)
    with requests.Session() as session:
        return await asyncio.to_thread(how, told, server.url, session)


def checked(case: Any, url: str, session: Any, found: list[str]) -> Any:
    """Send a case; add what is wrong with the answer."""
    import schemathesis
    from schemathesis.specs.openapi import checks

    response = case.call(base_url=url, session=session)
    kept = [
        schemathesis.checks.not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
        checks.negative_data_rejection,
    ]
    try:
        case.validate_response(response, checks=kept)
    except schemathesis.core.failures.FailureGroup as group:
        found += [f"{case.operation.label}: {failure}" for failure in group.exceptions]
    return response


def attack(told: dict[str, Any], url: str, session: Any) -> list[str]:
    """Random requests to every operation, the same on every run; what was found, in words."""
    import hypothesis
    import schemathesis
    from schemathesis import GenerationMode

    settings = hypothesis.settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    found: list[str] = []

    def run(strategy: Any) -> None:
        @settings
        @hypothesis.given(case=strategy)
        def once(case: Any) -> None:
            checked(case, url, session, found)

        once()

    for result in schemathesis.openapi.from_dict(told).get_all_operations():
        operation = result.ok()
        run(operation.as_strategy(generation_mode=GenerationMode.POSITIVE))
        if operation.body or operation.query:
            run(operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))
    return found


def visit(told: dict[str, Any], url: str, session: Any) -> list[str]:
    """The documented example of every operation, and again as a stream where there is one. Operations
    that need something on the server get it."""
    import schemathesis

    found: list[str] = []

    def send(operation: Any, **parts: Any) -> Any:
        response = checked(operation.Case(**parts), url, session, found)
        if response.status_code != 200:
            found.append(f"{operation.label}: {response.status_code} {response.text[:200]}")
        return response

    line = b'{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {}}'
    form = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", line)}}
    file = session.post(f"{url}/v1/files", **form).json()["id"]
    spare = session.post(f"{url}/v1/files", **form).json()["id"]
    asked = {"input_file_id": file, "endpoint": "/v1/chat/completions"}
    batch = session.post(f"{url}/v1/batches", json=asked).json()["id"]
    later = {"input": "Hello", "background": True, "stream": True}
    stream = session.post(f"{url}/v1/responses", json=later).text
    response = re.search(r'"id": ?"(resp_\w+)"', stream).group(1)
    ids = {
        "DELETE /v1/files/{id}": spare,
        "/v1/files": file,
        "/v1/batches": batch,
        "/v1/responses": response,
        "/v1/models": CARD.name,
        "/debug": "known",
        "/page": "page.js",
    }
    bodies = {"/v1/batches": asked, "/update_weights_from_disk": {"model_path": "m"}}
    last = "DELETE /v1/responses/{id}"
    operations = [result.ok() for result in schemathesis.openapi.from_dict(told).get_all_operations()]
    for operation in sorted(operations, key=lambda operation: operation.label == last):
        label, path = operation.label, operation.path
        responses = told["paths"][path][operation.method]["responses"]
        if label == "POST /v1/files" or path in NOT_GENERATING:  # sent above; of another model
            continue
        parts: dict[str, Any] = {}
        if "{id}" in path:
            parts["path_parameters"] = {"id": next(id for at, id in ids.items() if at in label)}
        content = told["paths"][path][operation.method].get("requestBody", {}).get("content", {})
        if content:
            parts["body"] = content["application/json"].get("example", bodies.get(path, {}))
            parts["media_type"] = "application/json"
        send(operation, **parts)
        if "text/event-stream" not in responses["200"].get("content", ()):
            continue
        if content:
            parts["body"] = {**parts["body"], "stream": True}
        else:
            parts["query"] = {"stream": "true"}
        answer = send(operation, **parts)
        if "text/event-stream" not in answer.headers["content-type"][0]:
            found.append(f"{label}: no events")
    return found
