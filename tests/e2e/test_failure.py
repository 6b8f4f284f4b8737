"""A device failure during a step: every stream ends with an error, health reports it, the process exits."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from app.process import HUNG
from bench.chaos.tiny import dummy_model, flags
from tests.rigs.process import Process, read_events, serving
from tests.rigs.wait import PATIENCE

WITHIN = 1.0
"""Seconds until health must report the failure."""

PARALLEL = (
    ("--tp", "1", "--dp", "1"),
    ("--tp", "2"),
    ("--dp", "2", "--load-balance-method", "round_robin"),
)
"""Flags of the servers. Of two ranks one breaks, and the other waits for it. Of two replicas one has the
other stream, and the second breaks."""


def enough_gpus(parallel: tuple[str, ...]) -> pytest.MarkDecorator:
    needed = 2 if "2" in parallel else 1
    return pytest.mark.skipif(torch.cuda.device_count() < needed, reason=f"needs {needed} GPUs")


BODY = {"prompt": "x" * 20, "max_tokens": 1500, "ignore_eos": True, "stream": True}


async def failing(
    server: Process, fault: str = "fault", **other_fields: object
) -> tuple[list[Any], list[Any], float]:
    """The events of another stream, with more fields, and of the request that breaks the device, and the
    seconds until health reported it after the streams had ended."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE)) as session:
        await server.ready(session)
        url = f"{server.url}/v1/completions"
        async with session.post(url, json={**BODY, **other_fields}) as other:
            assert other.status == 200
            await other.content.readuntil(b"\n\n")
            broken = {**BODY, "custom_logit_processor": fault}
            async with session.post(url, json=broken) as breaking:
                ends = await asyncio.gather(read_events(other), read_events(breaking))
            begun = time.monotonic()
            try:
                async with session.get(f"{server.url}/health") as health:
                    assert health.status == 503, await health.text()
                    assert "failed" in await health.text()
            except aiohttp.ClientConnectionError:
                pass  # the process has exited already
            return ends[0], ends[1], time.monotonic() - begun


@pytest.mark.parametrize(
    ("device", "parallel"),
    [
        *(("cpu", each) for each in PARALLEL),
        *(pytest.param("cuda", each, marks=[pytest.mark.gpu, enough_gpus(each)]) for each in PARALLEL),
    ],
)
async def test_a_step_that_fails(tmp_path: Path, device: str, parallel: tuple[str, ...]) -> None:
    """On a GPU its context is lost, and the kernels of another rank wait for it meanwhile."""
    more = ["--device", device, *parallel, "--logit-processor", "fault=tests.rigs.processors:fault"]
    # CUDA may have been asked for its devices in the process of a fork, and works in no fork then.
    with serving(*flags(dummy_model(tmp_path / "model")), *more, own=device == "cuda") as server:
        other, breaking, delay = await failing(server)
        assert server.wait() != 0
        log = server.log()
    assert delay < WITHIN
    for events in (other, breaking):
        error = events[-2]["error"]
        assert events[-1] == "[DONE]"
        assert error["type"] == "server_error" and error["message"], error
    assert "the engine failed" in log


@pytest.mark.parametrize("parallel", PARALLEL[1:])
async def test_a_device_that_hangs(tmp_path: Path, parallel: tuple[str, ...]) -> None:
    processors = [f"{name}=tests.rigs.processors:{name}" for name in ("hang", "slow")]
    more = [*parallel, "--logit-processor", ",".join(processors), "--watchdog-timeout", "1"]
    with serving(*flags(dummy_model(tmp_path / "model")), *more) as server:
        # Without slower steps the other replica's stream could end before the watchdog's limit.
        other, breaking, delay = await failing(server, "hang", custom_logit_processor="slow")
        assert server.wait() == HUNG
        log = server.log()
    assert delay < WITHIN
    for events in (other, breaking):
        assert events[-1] == "[DONE]"
        assert "--watchdog-timeout" in events[-2]["error"]["message"]
    assert "loom-launch" in log or "in hang" in log, "the stacks of all threads"
