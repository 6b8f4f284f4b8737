"""Mixed traffic for a long time."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np

from bench.chaos.bench import GROWTH, Bench
from bench.chaos.clients import CHAT, NATIVE, TEXT, post, request, reset
from bench.chaos.row import Outcome

ROUNDS = 3
TEXTS = 64
"""Different prompts. The tokenizers library caches 10,000 short texts, 0.7 KB each: with a new prompt in each
round that cache alone grew by 80 MB an hour for the first hours."""
SLOPE = 30 * 2**20
"""Bytes an hour by which memory may grow, fitted over the last three quarters."""
HOUR = 3600.0


async def soak(bench: Bench) -> Outcome:
    """Valid, invalid, streamed, constrained and disconnected requests in rounds; memory is read after
    each."""
    outcome = Outcome()
    seconds = 60 * bench.soak * bench.scale
    begun, readings = time.monotonic(), list[tuple[float, int]]()
    served = 0
    while len(readings) < ROUNDS or time.monotonic() - begun < seconds:
        served += await _round(bench, outcome, len(readings))
        accounting = await bench.idle_accounting()
        readings.append((time.monotonic() - begun, accounting["rss"]))
        outcome.expect(
            accounting["free"] + accounting["cached"] == accounting["pages"],
            "pages are neither free nor cached",
        )
        outcome.expect(not accounting["integrity"], accounting["integrity"])
        if outcome.violations or readings[-1][1] - readings[0][1] > GROWTH:
            break
    late = np.array(readings[len(readings) // 4 :])
    slope = float(np.polyfit(late[:, 0], late[:, 1], 1)[0]) * HOUR
    outcome.figures |= {
        "minutes": round(readings[-1][0] / 60, 1),
        "requests": served,
        "slope_mb_per_hour": round(slope / 2**20, 1),
        "grown_mb": round((readings[-1][1] - readings[0][1]) / 2**20, 1),
    }
    outcome.expect(not bench.timed or slope < SLOPE, f"memory grows by {slope / 2**20:.0f} MB an hour")
    return outcome


async def _round(bench: Bench, outcome: Outcome, index: int) -> int:
    prompt = f"round {index % TEXTS} of many "
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    chat = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 24, "ignore_eos": True}
    requests: list[tuple[str, dict[str, Any], int]] = [
        (TEXT, body, 200),
        (TEXT, {**body, "stream": True, "logprobs": 2}, 200),
        (TEXT, {**body, "n": 3, "temperature": 1}, 200),
        (CHAT, chat, 200),
        (CHAT, {**chat, "stream": True}, 200),
        (NATIVE, {"text": prompt, "sampling_params": {"max_new_tokens": 8}}, 200),
        (TEXT, {**body, "ignore_eos": False, "regex": f"[a-z]{{4}}{index % 7}"}, 200),
        (TEXT, {**body, "temperature": -1}, 400),
        ("/tokenize", {"prompt": prompt}, 200),
        ("/nowhere", {}, 404),
    ]
    answers = await asyncio.gather(
        *(post(bench.port, path, sent) for path, sent, _ in requests for _ in range(4)),
        _disconnect(bench, body),
    )
    statuses = [status for _, _, status in requests for _ in range(4)]
    for answer, status in zip(answers, statuses, strict=False):
        assert answer is not None
        outcome.expect(answer.status == status, f"{answer.status}, expected {status}: {answer.body[-200:]!r}")
    return len(statuses) + 1


async def _disconnect(bench: Bench, body: dict[str, Any]) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", bench.port)
    writer.write(request("POST", TEXT, {**body, "max_tokens": 1000, "stream": True}))
    await asyncio.sleep(0.02)
    reset(writer)
