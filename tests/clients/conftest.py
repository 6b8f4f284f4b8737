"""The server that `tests/app` uses."""

from __future__ import annotations

from tests.app.conftest import server, start

__all__ = ["server", "start"]
