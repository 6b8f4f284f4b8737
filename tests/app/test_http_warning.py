"""Warnings reach the client of the request that they are about, and nobody else."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from app.api.request.schema import CompletionBody
from app.engine.job import Job, Sink
from app.helper.process import HelpersBySize
from app.http.body import decode
from app.warning import HEADER, MAX_BODY, MAX_CHARS, MAX_UNKNOWN, MAX_WARNINGS, header_value, warn, warnings
from tests.rigs.server import Server

CHAT = "/v1/chat/completions"


async def asked(server: Server, content: str, **fields: object) -> str | None:
    sent = {"messages": [{"role": "user", "content": content}], **fields}
    async with server.http.post(CHAT, json=sent) as response:
        assert response.status == 200
        await response.read()
        return response.headers.get(HEADER)


@pytest.mark.parametrize("stream", [False, True])
async def test_each_request_has_its_own_warnings(
    server: Server, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = server.engine.start

    async def warning(job: Job, sink: Sink) -> Any:
        if "warn" in (text := str(job.prompt).split()[1]):
            warn(text)
            await asyncio.sleep(0)
            await asyncio.create_task(later(text))
        return await start(job, sink)

    async def later(text: str) -> None:
        warn(text)
        warn(f"again\r\n{text} é")

    monkeypatch.setattr(server.engine, "start", warning)
    names = ["warn0", "plain", "warn2"]
    told = await asyncio.gather(*(asked(server, name, stream=stream) for name in names))
    again = r"again\r\nwarn{} \xe9"
    assert told == [f"warn0; {again.format(0)}", None, f"warn2; {again.format(2)}"]
    assert await asked(server, "plain", stream=stream) is None  # on a connection that has had one


async def test_a_refused_request_is_warned_too(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(job: Job, sink: Sink) -> Any:
        warn("look")
        raise ValueError

    monkeypatch.setattr(server.engine, "start", refuse)
    async with server.http.post(CHAT, json={"messages": [{"role": "user", "content": "x"}]}) as response:
        assert (response.status, response.headers[HEADER]) == (500, "look")


def test_warnings_are_bounded() -> None:
    warn("to nobody")
    with warnings() as said:
        for at in range(50):
            warn(f"{at} " + "é" * 5_000)
            warn(f"{at} " + "é" * 5_000)
    assert len(said) == MAX_WARNINGS and len(header_value(said)) <= MAX_WARNINGS * (MAX_CHARS + 2)


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "max_token": 5}, ["max_token", "max_tokens"]),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "topP": 0.5}, ["topP", "top_p"]),
        ("/v1/completions", {"prompt": "x", "temprature": 0}, ["temprature", "temperature"]),
        (
            "/generate",
            {"text": "x", "sampling_params": {"max_new_token": 5}},
            ["sampling_params.max_new_token", "sampling_params.max_new_tokens"],
        ),
        ("/v1/responses", {"input": "x", "max_output_token": 5}, ["max_output_token", "max_output_tokens"]),
        ("/v1/completions", {"prompt": "x", "client_metadata": {}, "no_such_field": 1}, []),
        ("/v1/completions", {"prompt": "x", "x" * 65: 1}, []),
    ],
)
async def test_a_field_that_is_nearly_a_known_one(
    server: Server, path: str, body: dict[str, Any], said: list[str]
) -> None:
    async with server.http.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        value = response.headers.get(HEADER, "")
    assert all(f"'{name}'" in value for name in said) and bool(value) == bool(said)


async def test_many_unknown_fields_cost_no_more_than_a_few() -> None:
    bodies = HelpersBySize()
    body = msgspec.json.encode({"prompt": "x", **{f"max_token{at}": 1 for at in range(500)}})
    with warnings() as said:
        await decode(CompletionBody, body, bodies)
    assert len(said) == MAX_UNKNOWN
    with warnings() as said:
        await decode(CompletionBody, body + b" " * MAX_BODY, bodies)
    assert said == []
    bodies.close()


@pytest.mark.parametrize(
    "body",
    [b'{"prompt":"a","max_tok\xe5ns":16}', b'{"text":"a","sampling_params":{"ma\x8f_new_tokens":3}}'],
)
async def test_a_name_that_is_no_text_is_passed_over_like_any_other(server: Server, body: bytes) -> None:
    for path in ("/v1/completions", "/generate"):
        async with server.http.post(path, data=body) as response:
            assert response.status in (200, 400), await response.text()
            assert HEADER not in response.headers
