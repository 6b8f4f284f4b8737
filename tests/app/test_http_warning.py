"""Warnings reach the client of the request that they are about, and nobody else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.http.warning import HEADER, MAX_CHARS, MAX_WARNINGS, header_value, warn, warnings
from app.job import Job, Sink
from tests.app.conftest import Server

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
