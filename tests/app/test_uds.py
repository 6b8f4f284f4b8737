"""A Unix domain socket in place of a port."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from app.api.routes import make_app
from app.http.server import Runner
from app.listen import listen
from app.service import Service
from core.config import ServeConfig
from core.errors import ConfigError


async def test_a_server_listens_on_a_path(tmp_path: Path) -> None:
    serve = ServeConfig(uds=str(tmp_path / "http"), data_dir=str(tmp_path / "data"))
    runner = Runner(make_app(Service({}), serve))
    await runner.setup()
    try:
        assert str(await listen(runner, serve)) == serve.uds
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(serve.uds)) as session:
            async with session.get("http://loom/health") as answer:
                assert (await answer.json())["status"] == "starting"
            async with session.get("http://loom/nowhere") as unknown:
                assert unknown.status == 404
        nowhere = ServeConfig(uds=str(tmp_path / "no" / "http"))
        with pytest.raises(ConfigError, match=r"--uds .*/no/http: No such file"):
            await listen(runner, nowhere)
    finally:
        await runner.cleanup()
