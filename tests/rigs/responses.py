"""Streams of the Responses API, and records of its store."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from app.api.responses.disk import Record
from core.types import Finish, FinishReason
from tests.rigs.server import Server

URL = "/v1/responses"
SCRIPT = [
    "<think>",
    "hm",
    "m</think>",
    "Sure. ",
    '<tool_call>\n{"name": "add", "arg',
    'uments": {"a"',
    ": 1}}\n</tool_call>",
]
STOP = Finish(FinishReason.STOP)


async def frames(server: Server, method: str, url: str, body: object = None) -> list[bytes]:
    """The frames of a stream."""
    async with server.http.request(method, url, json=body) as response:
        assert response.status == 200, await response.text()
        return split(await response.read())


def split(data: bytes) -> list[bytes]:
    assert data.endswith(b"\n\n")
    return data[:-2].split(b"\n\n")


def events(listed: list[bytes]) -> list[dict[str, Any]]:
    made = []
    for number, frame in enumerate(listed):
        name, data = frame.decode().split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == number
        made.append(event)
    return made


def record(id: str, status: str = "completed", owner: str = "me", **more: object) -> Record:
    """A stored response whose input and output items contain its id."""
    doc = {"id": id, "status": status, "output": [{"id": f"out-{id}", "type": "message"}]}
    items = [{"id": f"in-{id}", "type": "message"}]
    fields = {"created": 2**31, "input": msgspec.json.encode(items), "doc": msgspec.json.encode(doc), **more}
    return Record(id=id, owner=owner, status=status, **fields)  # type: ignore[arg-type]
