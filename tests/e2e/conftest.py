"""A server for the tests that need none of their own, its model, and a client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from bench.chaos.tiny import dummy_model, flags
from tests.rigs.process import Process, serving
from tests.rigs.wait import PATIENCE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the dummy model."""
    return dummy_model(tmp_path_factory.mktemp("dummy"))


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """A client whose requests time out."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE)) as opened:
        yield opened


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A server of the dummy model with the default settings. Nobody changes them, kills it, or counts what it
    has done so far."""
    with serving(*flags(dummy_model(tmp_path_factory.mktemp("shared")))) as process:
        yield process
