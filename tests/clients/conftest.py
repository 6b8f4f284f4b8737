"""HTTP servers with a fake engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.rigs.server import Server, Start, starting


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts servers; all of them are stopped after the test."""
    async with starting(tmp_path) as start:
        yield start


@pytest.fixture
async def server(start: Start) -> Server:
    """A ready server with the default settings."""
    return await start()
