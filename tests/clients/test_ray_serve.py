"""Two replicas of `configs/deploy/ray_serve.py` on a Ray of this host.

pip install -e '.[test,ray]' && pytest -m slow tests/clients/test_ray_serve.py
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest

from bench.chaos.tiny import ROOT, dummy_model, flags, free_port
from tests.rigs.metrics import samples
from tests.rigs.process import read_events
from tests.rigs.wait import PATIENCE

pytestmark = [
    pytest.mark.slow,  # 44 s
    pytest.mark.skipif(find_spec("ray") is None, reason="needs ray"),
]

BODY = {"prompt": "x" * 20, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
LONG = {**BODY, "max_tokens": 2000, "stream": True}


class Deployed(NamedTuple):
    """The deployment, and the model directory by which its processes are found."""

    url: str
    model: Path

    def servers(self) -> Mapping[int, str]:
        """The sockets of the replicas' servers, by process."""
        found = {}
        for each in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = each.read_text().split("\0")
            except OSError:
                continue  # it has ended
            if "--uds" in words and str(self.model) in words:
                found[int(each.parent.name)] = words[words.index("--uds") + 1]
        return found


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    """Started by Ray's own command."""
    place, port = tmp_path_factory.mktemp("ray"), free_port()
    model = dummy_model(place / "model")
    application = {
        "name": "loom",
        "route_prefix": "/",
        "import_path": "configs.deploy.ray_serve:replicas",
        "args": {"replicas": "2", "cpus": "0.1", "flags": " ".join(flags(model))},
    }
    settings = {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [application]}
    (place / "serve.yaml").write_text(json.dumps(settings))  # JSON is YAML
    quiet = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
    with (place / "log").open("w") as log:
        serving = subprocess.Popen(
            [sys.executable, "-m", "ray.serve.scripts", "run", str(place / "serve.yaml")],
            cwd=ROOT,
            env={**os.environ, **quiet},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield Deployed(f"http://127.0.0.1:{port}", model)
        finally:
            serving.send_signal(signal.SIGINT)
            serving.wait(PATIENCE)
            print((place / "log").read_text())


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE)) as opened:
        yield opened


async def counted(deployed: Deployed, name: str) -> list[float]:
    """A counter of each replica whose server is ready."""
    found = []
    for path in deployed.servers().values():
        try:
            async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as own:
                async with own.get("http://loom/health") as health:
                    ready = health.status == 200
                async with own.get("http://loom/metrics") as answer:
                    values = samples(await answer.text())
        except aiohttp.ClientConnectionError:
            continue
        if ready:
            found.append(sum(value for (own_name, _), value in values.items() if own_name == name))
    return found


async def two_ready(deployed: Deployed, session: aiohttp.ClientSession) -> None:
    async with asyncio.timeout(PATIENCE):
        while len(await counted(deployed, "loom_requests_running")) < 2 or not await passes(
            deployed, session
        ):
            await asyncio.sleep(0.1)


async def passes(deployed: Deployed, session: aiohttp.ClientSession) -> bool:
    try:
        async with session.get(f"{deployed.url}/health") as health:
            return health.status == 200
    except aiohttp.ClientConnectionError:
        return False


async def test_both_replicas_answer_and_a_lost_one_is_replaced(
    deployed: Deployed, session: aiohttp.ClientSession
) -> None:
    url = f"{deployed.url}/v1/completions"
    await two_ready(deployed, session)

    async def text() -> str:
        async with session.post(url, json=BODY) as answer:
            assert answer.status == 200
            assert len(answer.headers.getall("X-Request-Id")) == 1
            return str((await answer.json())["choices"][0]["text"])

    # Serve looks at two replicas' queues, so that many at once meet both.
    async with asyncio.timeout(PATIENCE):
        while 0 in await counted(deployed, "loom_requests_finished_total"):
            assert len(set(await asyncio.gather(*(text() for _ in range(8))))) == 1

    # A stream has the whole text's pieces.
    async with session.post(url, json={**BODY, "stream": True}) as answer:
        events = await read_events(answer)
    assert events[-1] == "[DONE]"
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == await text()

    # Errors keep their shape.
    async with session.post(url, json={**BODY, "max_tokens": -3}) as answer:
        assert answer.status == 400
        error = (await answer.json())["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "max_tokens")
    async with session.get(f"{deployed.url}/nowhere?a=%20") as answer:
        assert answer.status == 404 and (await answer.json())["error"]["type"]

    # The request of a client that disconnects is aborted.
    gone = await session.post(url, json=LONG)
    await gone.content.readuntil(b"\n\n")
    assert sum(await counted(deployed, "loom_requests_running")) == 1
    gone.close()
    async with asyncio.timeout(PATIENCE):
        while sum(await counted(deployed, "loom_requests_running")):
            await asyncio.sleep(0.05)

    # A replica whose server is gone is another's one soon.
    before = set(deployed.servers())
    os.kill(min(before), signal.SIGKILL)
    async with asyncio.timeout(PATIENCE):
        while len(set(deployed.servers()) - {min(before)}) < 2:
            async with session.post(url, json=BODY) as answer:
                if answer.status != 200:
                    assert answer.status == 503
                    assert (await answer.json())["error"]["code"] == "service_unavailable"
    await two_ready(deployed, session)
    assert await text()
