"""A KV pool of a twentieth of the demand."""

from __future__ import annotations

import asyncio
from typing import Any

from bench.chaos.bench import Bench
from bench.chaos.clients import TEXT, post
from bench.chaos.row import Outcome, Setting

TOKENS = 120
LENGTHS = (16, 40, 64)
SHARE = 0.05


async def pool(bench: Bench) -> Outcome:
    """Requests are preempted and resumed; every text is the same as with a large pool."""
    outcome, count = Outcome(), bench.count(256, 16)
    original = bench.server.setting
    assert original is not None
    bodies: list[dict[str, Any]] = [
        {
            "prompt": f"{i} is a number, and after it comes another one, greater by one"[: LENGTHS[i % 3]],
            "max_tokens": TOKENS,
            "temperature": 1.0 if i % 4 else 0.0,  # a tiny model repeats itself where nothing is drawn
            "seed": i,
            "ignore_eos": True,
        }
        for i in range(count)
    ]
    expected = await _texts(bench, bodies)
    need = sum(len(body["prompt"]) + 1 + TOKENS for body in bodies)
    tokens = max(int(need * SHARE) // 16 * 16, 2 * (max(LENGTHS) + TOKENS))
    await bench.serve(Setting(original.device, ("--kv-tokens", str(tokens), "--conservativeness", "0.01")))
    await bench.inject()
    texts = await _texts(bench, bodies)
    retractions = (await bench.server.call("progress"))["retractions"]
    different = sum(a != b for a, b in zip(texts, expected, strict=True))
    outcome.figures |= {"requests": count, "pool_tokens": tokens, "needed": need, "retractions": retractions}
    outcome.expect(retractions > 0, "no preemption: the pool is too large")
    outcome.expect(not different, f"{different} texts differ from those with a large pool")
    return outcome


async def _texts(bench: Bench, bodies: list[dict[str, Any]]) -> list[str]:
    answers = await asyncio.gather(*(post(bench.port, TEXT, body) for body in bodies))
    return [answer.text for answer in answers]
