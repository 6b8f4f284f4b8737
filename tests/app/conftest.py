"""Servers with an engine that only talks, and engines over a fake device."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import openai
import pytest

from app.http import middleware
from app.text.tokenizer import Tokenizer
from core.adapters import AdapterLimits
from tests.rigs.server import Server, Start, starting
from tests.rigs.step_loop import VOCAB, Bench


@pytest.fixture(autouse=True)
def levels() -> Iterator[None]:
    """Put back what `/configure_logging` changes in this process; random requests call it too."""
    loggers = (logging.getLogger(), logging.getLogger(middleware.__name__))
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts servers; all of them are gone after the test."""
    async with starting(tmp_path) as start:
        yield start


@pytest.fixture
async def server(start: Start) -> Server:
    """A ready server with the default settings."""
    return await start()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    """The client that everybody uses, of `server`, whichever that is."""
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Bytes are tokens."""
    return Tokenizer.load(None, VOCAB, [2])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory of adapters, `a` to `h`, whose files nobody reads."""
    for name in "abcdefgh":
        (tmp_path / "roots" / name).mkdir(parents=True)
    return tmp_path / "roots"


@pytest.fixture(params=[(depth, drafts) for depth in (0, 1, 2) for drafts in (0, 3)])
async def bench(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> AsyncIterator[Bench]:
    """An engine at every depth, with rows of one token and of several."""
    depth, drafts = request.param
    bench = Bench(tokenizer, depth=depth, drafts=drafts)
    yield bench
    bench.scheduler.check_integrity()
    assert bench.submitter.idle
    bench.engine.close()


@pytest.fixture
async def featured(server: Server, tokenizer: Tokenizer, tmp_path: Path) -> AsyncIterator[Server]:
    """A server of the step loop with drafts and adapters, after some requests."""
    limits = AdapterLimits(places=2, max_rank=8, host=3)
    bench = Bench(tokenizer, drafts=3, adapters=limits, roots=(tmp_path,))
    loaded = server.service.loaded
    server.service.ready(msgspec.structs.replace(loaded, engine=bench.submitter, adapters=bench.adapters))
    body = {"prompt": [5, 6, 7, 8], "max_tokens": 40, "n": 2, "ignore_eos": True}
    for stream in (False, True):
        async with server.http.post("/v1/completions", json={**body, "stream": stream}) as response:
            assert response.status == 200
            await response.read()
    yield server
    bench.engine.close()
