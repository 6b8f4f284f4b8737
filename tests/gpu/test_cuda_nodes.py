"""Nodes on GPUs: two processes with one each, whose ranks exchange by NCCL inside of the graphs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest
import torch

from app.process import FAILED
from bench.chaos.tiny import dummy_model, flags, free_port
from tests.rigs.process import Process, read_events, run_to_end, serving
from tests.rigs.sockets import listening
from tests.rigs.texts import texts
from tests.rigs.wait import PATIENCE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@contextmanager
def two_nodes(common: list[str]) -> Iterator[tuple[Process, Process]]:
    common = [*common, "--tp", "2", "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}"]
    second = [*common, "--node-rank", "1", "--base-gpu-id", "1"]
    with serving(*common, own=True) as zero, serving(*second, own=True) as one:
        yield zero, one


def gpu_flags(path: Path, dtype: str) -> list[str]:
    return [*flags(dummy_model(path)), "--device", "cuda", "--dtype", dtype]


@pytest.mark.parametrize("more", [(), ("--no-cuda-graphs",), ("--speculative-algorithm", "ngram")])
async def test_two_nodes_say_what_one_gpu_says(more: tuple[str, ...], tmp_path: Path) -> None:
    """In float32; with graphs, without, and with drafts, whose number is settled by measurement."""
    common = [*gpu_flags(tmp_path, "float32"), *more]
    with serving(*common, own=True) as alone:
        expected = await texts(alone)
    with two_nodes(common) as (zero, one):
        assert await texts(zero) == expected
        places = listening(zero.process.pid) + listening(one.process.pid)
        assert not any(set(place) == {"0"} for place in places), "all interfaces"
        one.signal(signal.SIGTERM)
        zero.signal(signal.SIGTERM)
        assert (zero.wait(), one.wait()) == (0, 0)


async def test_a_node_that_is_killed_ends_the_other(tmp_path: Path) -> None:
    """Though a kernel waits for it. In bfloat16."""
    body = {"prompt": "x" * 20, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE)) as session:
        with two_nodes(gpu_flags(tmp_path, "bfloat16")) as (zero, one):
            await zero.ready(session)
            stream = await session.post(f"{zero.url}/v1/completions", json=body)
            await stream.content.readuntil(b"\n\n")
            one.signal(signal.SIGKILL)
            events = await read_events(stream)
            assert events[-2]["error"]["type"] == "server_error"
            assert zero.wait() == FAILED
            assert "node 1 at 127.0.0.1" in zero.log()


def test_a_process_with_two_gpus_is_refused(tmp_path: Path) -> None:
    more = ["--tp", "4", "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}"]
    ended = run_to_end(*gpu_flags(tmp_path, "float32"), *more, own=True)
    assert ended.returncode == 2
    assert "with --nnodes 4 in all (torchrun --nproc-per-node 2)" in ended.stderr
