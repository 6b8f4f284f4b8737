"""Thousands at once: streams with checksums, and bursts against a bounded queue."""

from __future__ import annotations

import asyncio
from collections import Counter

from bench.chaos.bench import Bench
from bench.chaos.clients import TEXT, post
from bench.chaos.counting import follow
from bench.chaos.neighbour import Neighbour
from bench.chaos.row import Found

TOKENS = 32
AT_ONCE = 48
REFUSED_WITHIN = 0.050
"""Seconds."""


async def streams(bench: Bench) -> Found:
    """Every stream's tokens follow from its prompt: one that is lost, doubled or another's shows."""
    found, count = Found(), bench.count(10_000, 20)
    wrong: list[str] = []

    async def one(index: int) -> None:
        prompt = [65 + index % 26, 66 + index // 26 % 26, 67 + index // 676, *b"and so on"]
        body = {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        answer = await post(bench.port, TEXT, {**body, "temperature": 0, "return_token_ids": True})
        tokens = answer.tokens
        if tokens != follow(prompt, TOKENS):
            wrong.append(
                f"stream {index}: {answer.status}, {answer.headers}, {tokens}, {answer.body[-200:]!r}"
            )

    await asyncio.gather(*(one(index) for index in range(count)))
    lag = (await bench.server.tell("progress"))["lag"]
    found.figures |= {
        "lag_ms": round(1e3 * lag, 1),
        "streams": count,
        "tokens": count * TOKENS,
        "wrong_streams": len(wrong),
    }
    found.expect(not wrong, f"{len(wrong)} of {count} streams are not what was asked for: {wrong[:1]}")
    return found


async def burst(bench: Bench) -> Found:
    """Accepted requests finish; the others are told at once, and when to come again.

    Clients come `AT_ONCE`, twice what the server takes: all at once on one machine, each would wait for
    the others' connections to be made, not for its answer."""
    found, count = Found(), bench.count(5_000, 60)
    statuses: Counter[int] = Counter()
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(index: int) -> None:
        prompt = [65, index % 60 + 32]
        body = {"prompt": prompt, "max_tokens": 16, "ignore_eos": True, "temperature": 0}
        async with gate:
            answer = await post(bench.port, TEXT, {**body, "return_token_ids": True})
        statuses[answer.status] += 1
        if answer.status == 429:
            known = {"retry-after", "retry-after-ms"} <= set(answer.headers)
            found.expect(known, "a refusal does not say when to come again")
            found.expect(answer.json["error"]["code"] == "rate_limit_exceeded", "a refusal of another kind")
        elif answer.status == 200:
            found.expect(answer.tokens == follow(prompt, 16), "an accepted answer is wrong")

    with Neighbour(bench.port, "refused") as probe:
        await asyncio.gather(*(one(index) for index in range(count)))
    refused = probe.seen["p99"]
    found.figures |= {
        "requests": count,
        "statuses": dict(statuses),
        "probes": probe.seen["count"],
        "refused_p99_ms": round(1e3 * refused, 1),
    }
    found.expect(set(statuses) <= {200, 429}, f"statuses {dict(statuses)}")
    found.expect(statuses[429] > 0, "nothing was refused: the queue has no bound")
    found.expect(not bench.timed or refused < REFUSED_WITHIN, f"a refusal takes {1e3 * refused:.0f} ms")
    return found
