"""Replicas of Loom over hosts, by Ray Serve.

    pip install 'loom-serve[ray]'
    serve run configs.deploy.ray_serve:replicas replicas=4 gpus=1 flags="--model org/name"

Ray places the replicas, balances requests over them, starts a failed one again and drains those that go.
Each starts `python -m app` with the `flags` as its child, on a Unix domain socket, and passes requests and
answers through unchanged: the child keeps what a server of one process relies on, its signals, its garbage
collection and its exit when a step hangs.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
from ray import serve
from yarl import URL

Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]

HOP = (b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"trailer")
"""Headers between two neighbours, not passed on."""
SERVES = (b"date", b"server", b"x-request-id")
"""Headers that Serve adds to an answer; the request's id is Serve's already."""
OWN_HEADERS = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
"""That aiohttp would add."""
UNAVAILABLE = "service_unavailable"
POLL_SECONDS = 0.1
STOP_SECONDS = 15.0
"""How long a replica waits for its server's end before it kills it: below Serve's 20."""


class Asgi:
    """The ASGI application of every replica: Serve wants one before there is a replica."""

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Requests are the replica's."""
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
        elif scope["type"] == "http":
            await serve.get_replica_context().servable_object.answer(scope, receive, send)


# Loom itself queues requests, and answers 503 to those that are too many.
@serve.deployment(max_ongoing_requests=4096, health_check_period_s=2)
@serve.ingress(Asgi())
class Loom:
    """A replica. Owner: its event loop."""

    async def __init__(self, flags: str = "") -> None:
        """Start the server and wait until it is ready. `flags` are those of `python -m app`."""
        self._place = tempfile.TemporaryDirectory(prefix="loom-")
        path = str(Path(self._place.name) / "http")
        self._server = subprocess.Popen([sys.executable, "-m", "app", *shlex.split(flags), "--uds", path])
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(path, limit=0),
            timeout=aiohttp.ClientTimeout(),
            auto_decompress=False,
            skip_auto_headers=OWN_HEADERS,
        )
        while not await self._ready():
            await asyncio.sleep(POLL_SECONDS)

    async def _ready(self) -> bool:
        self.check_health()
        try:
            async with self._session.get("http://loom/health") as health:
                return health.status == 200
        except aiohttp.ClientConnectionError:
            return False  # not listening yet

    def check_health(self) -> None:
        """Called by Serve, which replaces a replica that raises."""
        if (code := self._server.poll()) is not None:
            raise RuntimeError(f"the server has ended with {code}")

    async def __del__(self) -> None:
        """Called by Serve when requests have ended."""
        await self._session.close()
        self._server.terminate()
        try:
            await asyncio.to_thread(self._server.wait, STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._server.kill()
        self._place.cleanup()

    async def answer(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Pass a request on, and its answer as it comes. Cancelled when the client disconnects, which the
        server notices then."""
        query = scope["query_string"].decode("latin-1")
        path = scope.get("raw_path") or scope["path"].encode()
        url = URL(f"http://loom{path.decode('latin-1')}" + (f"?{query}" if query else ""), encoded=True)
        headers = [(name, value) for name, value in scope["headers"] if name not in HOP]
        sized = any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])
        try:
            answer = await self._session.request(
                scope["method"],
                url,
                headers=[(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers],
                data=_body(receive) if sized else None,
                allow_redirects=False,
            )
        except aiohttp.ClientConnectionError as error:
            await _refuse(send, f"The replica's server does not answer: {error}.")
            return
        async with answer:
            passed = [each for each in answer.raw_headers if each[0].lower() not in (*HOP, *SERVES)]
            await send({"type": "http.response.start", "status": answer.status, "headers": passed})
            async for piece in answer.content.iter_any():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


async def _body(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise aiohttp.ClientConnectionError("the client has disconnected")
        yield message.get("body", b"")
        more = message.get("more_body", False)


async def _refuse(send: Send, message: str) -> None:
    """503 in the shape of OpenAI's errors."""
    error = {"message": message, "type": UNAVAILABLE + "_error", "param": None, "code": UNAVAILABLE}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def replicas(args: Mapping[str, str]) -> serve.Application:
    """Serve's builder: `flags` of each server, the number of `replicas`, and the GPUs and CPUs of each."""
    resources = {"num_gpus": float(args.get("gpus", 0)), "num_cpus": float(args.get("cpus", 1))}
    number = int(args.get("replicas", 1))
    return Loom.options(num_replicas=number, ray_actor_options=resources).bind(args.get("flags", ""))
