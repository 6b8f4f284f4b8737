"""openai and the AI SDK for Node: each case of `node/cases.mjs` runs against a server with a scripted engine.

Needs `node`, and `npm install` in `tests/clients/node`.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from app.engine.job import Piece
from core.errors import Overloaded, Unavailable
from tests.rigs.batches import Rig
from tests.rigs.server import Server, know, refuse
from tests.rigs.wait import PATIENCE, until

HERE = Path(__file__).parent / "node"
NODE = shutil.which("node")

pytestmark = [
    pytest.mark.skipif(NODE is None, reason="needs node"),
    pytest.mark.skipif(
        not all((HERE / "node_modules" / name).is_dir() for name in ("openai", "ai", "@ai-sdk")),
        reason="needs npm install in tests/clients/node",
    ),
]

ADA = ['{"name": "Ada", ', '"age": 36}']
CALL = ["Sure. ", '<tool_call>\n{"name": "add", "arg', 'uments": {"a"', ": 1}}\n</tool_call>"]


@asynccontextmanager
async def running(case: str, url: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a case, which must exit with 0."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        str(NODE), "cases.mjs", case, url, cwd=HERE, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT
    )
    try:
        yield process
        async with asyncio.timeout(PATIENCE):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, output.decode()


async def run(case: str, url: str) -> None:
    async with running(case, url):
        pass


async def test_chat(server: Server) -> None:
    await run("chat", server.url)


async def test_stream(server: Server) -> None:
    await run("stream", server.url)


async def test_responses(server: Server) -> None:
    await run("responses", server.url)


async def test_parse(server: Server) -> None:
    server.engine.scripts = [ADA, ADA]
    await run("parse", server.url)
    assert all("age" in run.job.grammar.text for run in server.engine.runs)


async def test_tools(server: Server) -> None:
    know(server)
    server.engine.scripts = [CALL, ["2"]]
    await run("tools", server.url)
    assert str(server.engine.runs[1].job.prompt).endswith("assistant: Sure. \ntool: two\nassistant: ")


async def test_the_ai_sdk(server: Server) -> None:
    know(server)
    hello = ["Hello", " there", "."]
    server.engine.scripts = [hello, hello, CALL, ["2"], ADA] * 3
    await run("aiSdk", server.url)
    assert not server.engine.scripts


async def test_errors(server: Server) -> None:
    await run("errors", server.url)


async def test_429_and_503_are_retried(server: Server) -> None:
    full, starting = Overloaded("full", 0.01), Unavailable("starting")
    errors = refuse(server, full)
    begin = server.engine.start

    async def start(*arguments: object) -> object:
        run = await begin(*arguments)
        errors.extend([starting, starting])  # for the next request
        return run

    server.engine.start = start
    await run("retries", server.url)
    assert not errors and len(server.engine.runs) == 1


async def test_a_failure_mid_stream(server: Server) -> None:
    server.engine.fail_at = 2
    await run("broken", server.url)


async def test_a_disconnected_stream_is_aborted(server: Server) -> None:
    server.engine.manual = True
    async with running("abort", server.url) as process:
        async with asyncio.timeout(PATIENCE):
            await server.engine.started.wait()
        await until(lambda: bool(server.engine.runs))
        row = server.engine.runs[0]
        row.push(0, Piece("x", [1]))
        await until(lambda: row.aborted)
        assert process.stdin is not None
        process.stdin.write(b"\n")


async def test_batches(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        await run("batches", rig.url)
