"""Control routes: closed by default, and what they pass on."""

from __future__ import annotations

import pytest

from app.api.admin.control import ROUTES
from core.config import ServeConfig
from tests.rigs.server import Server, Start


@pytest.mark.parametrize("path", [route.path for route in ROUTES if route.method == "POST"])
async def test_they_are_off_unless_asked_for(server: Server, path: str) -> None:
    status, body = await server.post(path, {})
    assert status == 403
    assert "--control-routes" in body["error"]["message"]


@pytest.mark.parametrize(("path", "field"), [("/is_paused", "is_paused"), ("/is_sleeping", "is_sleeping")])
async def test_looking_is_free(server: Server, path: str, field: str) -> None:
    assert await server.get(path) == {field: False}


@pytest.mark.parametrize("path", ["/sleep", "/wake_up"])
async def test_an_unknown_tag_is_refused_by_name(start: Start, path: str) -> None:
    server = await start(ServeConfig(control_routes=True))
    for sent, body in ((f"{path}?tags=weights&tags=disk", {}), (path, {"tags": ["disk"]})):
        error = await server.refused(sent, body)
        assert "tags" in error["param"]
        assert "disk" in error["message"]
    assert (await server.post(f"{path}?tags=weights", {}))[0] == 200


async def test_an_unknown_level_of_sleep_is_refused(start: Start) -> None:
    server = await start(ServeConfig(control_routes=True))
    for level in ("0", "3", "abc", ""):
        assert (await server.refused(f"/sleep?level={level}", {}))["param"] == "level"
    for level in ("1", "2"):
        assert (await server.post(f"/sleep?level={level}", {}))[0] == 200
