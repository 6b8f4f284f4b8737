"""Servers that benches start are forks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from bench import servers
from tests.rigs.forked import Forked


@pytest.fixture(scope="session", autouse=True)
def forked() -> Iterator[None]:
    """As those of the end-to-end tests: an import of torch and the rest takes 2.9 s of CPU time."""

    def start(module: str, arguments: Sequence[str], log: Path) -> Forked:
        return Forked(module, *arguments, stdout=log, stderr=log)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(servers, "start", start)
        yield
