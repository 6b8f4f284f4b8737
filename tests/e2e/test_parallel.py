"""Several ranks on a CPU behind one port."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bench.chaos.tiny import dummy_model, flags
from tests.rigs.process import Process, read_events, run_to_end, serving
from tests.rigs.wait import PATIENCE

BODIES: list[dict[str, Any]] = [
    {"prompt": "x" * 20, "max_tokens": 40, "temperature": 0, "ignore_eos": True},
    {"prompt": "x" * 150, "max_tokens": 30, "seed": 7, "ignore_eos": True, "stream": True},
    {"prompt": "a number", "max_tokens": 12, "temperature": 0, "regex": "[0-9]{8}"},
]


async def told(server: Process) -> list[str]:
    """What a server says to each body."""
    found = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE)) as session:
        await server.ready(session)
        for body in BODIES:
            async with session.post(f"{server.url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                if body.get("stream"):
                    chunks = [event for event in await read_events(answer) if event != "[DONE]"]
                else:
                    chunks = [await answer.json()]
                found.append("".join(c["text"] for chunk in chunks for c in chunk["choices"]))
    return found


async def test_two_ranks_say_what_one_says(shared: Process, tmp_path: Path) -> None:
    one = await told(shared)
    with serving(*flags(dummy_model(tmp_path / "model")), "--tensor-parallel-size", "2") as server:
        two = await told(server)
    assert two == one
    assert len(one[0]) > 20 and one[2].isdigit()


@pytest.mark.parametrize(
    ("ranks", "reason"), [("3", "--tp 3 does not divide num_attention_heads (4)"), ("0", "--tp")]
)
def test_ranks_that_cannot_be_are_refused_at_start(tmp_path: Path, ranks: str, reason: str) -> None:
    ended = run_to_end(*flags(dummy_model(tmp_path / "model")), "--tp", ranks)
    assert ended.returncode == 2
    assert reason in ended.stderr
