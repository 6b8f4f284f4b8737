"""A real HTTP server on a free port, with a fake engine."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from app.api.routes import make_app
from app.engine.job import Job, Sink
from app.http.burst import Burst
from app.http.intake import Intake
from app.http.keys import BURST, INTAKE
from app.http.server import Runner
from app.parsers.registry import REASONING, TOOLS, ToolFamily
from app.service import ModelCard, Phase, Service
from core.clock import Clock, monotonic
from core.config import ServeConfig
from core.errors import LoomError
from tests.rigs.engine import CONTEXT, WIDTH, FakeEngine, FakeRun
from tests.rigs.operator import make_loaded
from tests.rigs.tokenizer import VOCAB, ByteTokenizer, JoinTemplate

CARD = ModelCard(
    name="org/tiny",
    path="/models/tiny",
    architecture="LlamaForCausalLM",
    context_length=CONTEXT,
    vocab_size=VOCAB,
    dtype="float32",
    size=1_000_000,
    created=1_700_000_000,
    hidden_size=WIDTH,
)


class Server:
    """A running server: its fake engine, its service, and a client session with its base URL."""

    def __init__(
        self, runner: Runner, port: int, service: Service, engine: FakeEngine, http: aiohttp.ClientSession
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.port = port
        self.service = service
        self.engine = engine
        self.http = http
        self._runner = runner

    @property
    def prompt(self) -> str:
        """The text that the model's last run continued."""
        shown = self.engine.runs[-1].job.prompt
        assert isinstance(shown, str)
        return shown

    @property
    def connections(self) -> int:
        """Number of open connections of the server."""
        assert self._runner.server is not None
        return len(self._runner.server.connections)

    @property
    def app(self) -> web.Application:
        """The application that is served."""
        return self._runner.app

    def limit_bodies(self, budget: int) -> Intake:
        """Limit the total bytes of request bodies."""
        bodies = self.app[INTAKE]
        bodies.budget = budget
        return bodies

    async def post(self, path: str, body: object = None, data: bytes | None = None) -> tuple[int, dict]:
        """Status and decoded body."""
        sent = {"json": body} if data is None else {"data": data}
        async with self.http.post(path, **sent) as response:
            return response.status, await response.json()

    async def get(self, path: str, **sent: Any) -> Any:
        """The decoded answer of status 200 to a GET."""
        return msgspec.json.decode(await self.text(path, **sent))

    async def text(self, path: str, **sent: Any) -> str:
        """The answer of status 200 to a GET."""
        async with self.http.get(path, **sent) as response:
            text = await response.text()
            assert response.status == 200, text
            return text

    async def ask(self, path: str, body: object) -> Any:
        """The decoded answer of status 200."""
        status, answer = await self.post(path, body)
        assert status == 200, answer
        return answer

    async def refused(self, path: str, body: object) -> Any:
        """The error of status 400."""
        status, answer = await self.post(path, body)
        assert status == 400, answer
        return answer["error"]

    async def events(self, path: str, body: object) -> list[str]:
        """The payloads of a stream's events."""
        async with self.http.post(path, json=body) as response:
            assert response.status == 200, await response.text()
            text = (await response.read()).decode()
        assert text.endswith("\n\n")
        events = text[:-2].split("\n\n")
        assert all(event.startswith("data: ") for event in events), events
        return [event[6:] for event in events]


Start = Callable[..., Awaitable[Server]]


@asynccontextmanager
async def starting(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts servers; all of them are stopped after the test."""
    runners: list[Runner] = []
    services: list[Service] = []
    sessions: list[aiohttp.ClientSession] = []

    async def start(
        serve: ServeConfig = ServeConfig(),  # noqa: B008
        ready: bool = True,
        sndbuf: int = 0,
        clock: Clock = monotonic,
    ) -> Server:
        engine = FakeEngine()
        service = Service({"device": "cpu"})
        if ready:
            service.ready(make_loaded(CARD, ByteTokenizer(), JoinTemplate(), engine))
        data = serve.data_dir or str(tmp_path / f"data{len(runners)}")
        serve = msgspec.structs.replace(serve, data_dir=data)
        runner = Runner(make_app(service, serve, clock), shutdown_timeout=1.0)
        await runner.setup()
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        if sndbuf:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, sndbuf)
        await web.SockSite(runner, listener).start()
        port = listener.getsockname()[1]
        session = aiohttp.ClientSession(base_url=f"http://127.0.0.1:{port}")
        runners.append(runner)
        services.append(service)
        sessions.append(session)
        return Server(runner, port, service, engine, session)

    try:
        yield start
    finally:
        for session in sessions:
            await session.close()
        for runner in runners:
            await runner.cleanup()
        for service in services:
            if service.health.phase is Phase.READY:
                service.loaded.helper.close()
                service.loaded.bodies.close()
        await asyncio.sleep(0)


@asynccontextmanager
async def answered(handler: Handler) -> AsyncIterator[aiohttp.ClientResponse]:
    """The response of one handler, behind a server that has no other."""
    app = web.Application()
    app[BURST] = Burst()
    app.router.add_get("/", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{port}/") as response:
            yield response
    finally:
        await runner.cleanup()


def refuse(server: Server, *errors: LoomError) -> list[LoomError]:
    """Reject the next requests with `errors`, one each. Returns the list of remaining errors."""
    remaining = list(errors)
    begin = server.engine.start

    async def start(job: Job, sink: Sink) -> FakeRun:
        if remaining:
            raise remaining.pop(0)
        return await begin(job, sink)

    server.engine.start = start
    return remaining


def know(
    server: Server,
    tools: str | None = "hermes",
    reasoning: str | None = None,
    routed: tuple[int, int] = (0, 0),
) -> None:
    """Set the tool call and reasoning parsers of the model, and its routed experts (layers, experts per
    token)."""
    family: ToolFamily | None = TOOLS[tools] if tools else None
    thinking = REASONING[reasoning] if reasoning else None
    card = msgspec.structs.replace(CARD, routed=routed)
    loaded = make_loaded(
        card, ByteTokenizer(), JoinTemplate(), server.engine, tools=family, reasoning=thinking
    )
    before = server.service.loaded
    server.service.ready(msgspec.structs.replace(loaded, helper=before.helper, bodies=before.bodies))


def serves(server: Server, **card: Any) -> None:
    """Replace fields of the model card."""
    loaded = server.service.loaded
    new_card = msgspec.structs.replace(CARD, **card)
    server.service.ready(make_loaded(new_card, loaded.tokenizer, loaded.template, server.engine))
