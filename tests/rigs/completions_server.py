"""A small OpenAI-compatible server with scripted answers, on aiohttp and without an engine."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

Body = dict[str, Any]
Script = Callable[[Body], list[str]]
"""The events (data only) of the answer to a request."""


def usage(body: Body, out: int, cached: int = 0) -> str:
    """A usage chunk for `body`."""
    prompt = body.get("prompt") or body["messages"][-1]["content"]
    count = len(prompt) if isinstance(prompt, list) else len(prompt.split())
    figures = {
        "prompt_tokens": count,
        "completion_tokens": out,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return json.dumps({"choices": [], "usage": figures})


def text(word: str, finish: str | None = None) -> str:
    """A completions chunk as JSON without spaces."""
    choice = {"index": 0, "text": word, "logprobs": None, "finish_reason": finish}
    return json.dumps({"id": "cmpl-1", "choices": [choice]}, separators=(",", ":"))


def delta(content: str | None, role: str | None = None, finish: str | None = None) -> str:
    """A chat chunk."""
    inner = {key: value for key, value in (("role", role), ("content", content)) if value is not None}
    choice = {"index": 0, "delta": inner, "finish_reason": finish}
    return json.dumps({"id": "chatcmpl-1", "choices": [choice]}, separators=(",", ":"))


def proper(body: Body) -> list[str]:
    """A correct answer: `max_tokens` tokens, finish reason, usage, `[DONE]`."""
    out = body["max_tokens"]
    if "messages" in body:
        events = [
            delta("", role="assistant"),
            *(delta(f" w{i}") for i in range(out)),
            delta(None, finish="length"),
        ]
    else:
        events = [*(text(f" w{i}") for i in range(out)), text("", finish="length")]
    return [*events, usage(body, out), "[DONE]"]


class Fake:
    """Answers with `script` and records requests. `refuse` returns status and message of an error, by request
    index."""

    def __init__(self, script: Script = proper) -> None:
        self.script = script
        self.bodies: list[Body] = []
        self.heads: list[dict[str, str]] = []
        self.flushed = 0
        self.refuse: Callable[[int], tuple[int, str] | None] = lambda _: None

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.heads.append({name.lower(): value for name, value in request.headers.items()})
        if (error := self.refuse(len(self.bodies) - 1)) is not None:
            return web.json_response({"error": {"message": error[1]}}, status=error[0])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in self.script(body):
            await response.write(f"data: {event}\n\n".encode())
        await response.write_eof()
        return response

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "tiny"}]})

    async def info(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"version": "1", "api_key": "hush", "model_path": "/home/me/models/tiny", "tp": 1}
        )

    async def flush(self, _: web.Request) -> web.Response:
        self.flushed += 1
        return web.Response()


@contextlib.asynccontextmanager
async def serving(fake: Fake) -> AsyncIterator[str]:
    """Serve `fake`; yields the base url."""
    app = web.Application(client_max_size=2**24)
    app.add_routes(
        [
            web.post("/v1/completions", fake.complete),
            web.post("/v1/chat/completions", fake.complete),
            web.get("/v1/models", fake.models),
            web.get("/server_info", fake.info),
            web.post("/flush_cache", fake.flush),
        ]
    )
    async with TestServer(app) as server:
        yield f"http://{server.host}:{server.port}"
