"""Control routes: closed by default, and what they pass on."""

from __future__ import annotations

import pytest

from app.http.control import TABLE
from tests.app.conftest import Server


@pytest.mark.parametrize("path", [path for method, path, _ in TABLE if method == "POST"])
async def test_they_are_off_unless_asked_for(server: Server, path: str) -> None:
    status, body = await server.post(path, {})
    assert status == 403
    assert "--control-routes" in body["error"]["message"]


@pytest.mark.parametrize(("path", "field"), [("/is_paused", "is_paused"), ("/is_sleeping", "is_sleeping")])
async def test_looking_is_free(server: Server, path: str, field: str) -> None:
    async with server.http.get(path) as answer:
        assert await answer.json() == {field: False}
