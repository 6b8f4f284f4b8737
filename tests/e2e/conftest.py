"""A server for the tests that need none of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.chaos.tiny import dummy_model, flags
from tests.rigs.process import Process, serving


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A server of the dummy model with the default settings. Nobody changes them, kills it, or counts what it
    has done so far."""
    with serving(*flags(dummy_model(tmp_path_factory.mktemp("shared")))) as process:
        yield process
