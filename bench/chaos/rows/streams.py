"""Thousands of concurrent streams with known outputs, and bursts against a bounded queue."""

from __future__ import annotations

import asyncio
from collections import Counter

from bench.chaos.bench import Bench
from bench.chaos.clients import TEXT, post
from bench.chaos.counting import expected_output
from bench.chaos.neighbour import Neighbour
from bench.chaos.row import Outcome

TOKENS = 32
CONCURRENCY = 48
REFUSED_WITHIN = 0.050
"""Seconds within which a refused request must be answered."""


async def streams(bench: Bench) -> Outcome:
    """The tokens of a stream are a function of its prompt, so that any wrong token is detected."""
    outcome, count = Outcome(), bench.count(10_000, 20)
    wrong: list[str] = []

    async def one(index: int) -> None:
        prompt = [65 + index % 26, 66 + index // 26 % 26, 67 + index // 676, *b"and so on"]
        body = {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        answer = await post(bench.port, TEXT, {**body, "temperature": 0, "return_token_ids": True})
        tokens = answer.tokens
        if tokens != expected_output(prompt, TOKENS):
            wrong.append(
                f"stream {index}: {answer.status}, {answer.headers}, {tokens}, {answer.body[-200:]!r}"
            )

    await asyncio.gather(*(one(index) for index in range(count)))
    lag = (await bench.server.call("progress"))["lag"]
    outcome.figures |= {
        "lag_ms": round(1e3 * lag, 1),
        "streams": count,
        "tokens": count * TOKENS,
        "wrong_streams": len(wrong),
    }
    outcome.expect(not wrong, f"{len(wrong)} of {count} streams are wrong: {wrong[:1]}")
    return outcome


async def burst(bench: Bench) -> Outcome:
    """Accepted requests finish; the others get 429 at once, with the time to retry after.

    `CONCURRENCY` is twice what the server accepts. With all requests at once the latency would be that of
    5,000 connects on one machine, not that of the server."""
    outcome, count = Outcome(), bench.count(5_000, 60)
    statuses: Counter[int] = Counter()
    gate = asyncio.Semaphore(CONCURRENCY)

    async def one(index: int) -> None:
        prompt = [65, index % 60 + 32]
        body = {"prompt": prompt, "max_tokens": 16, "ignore_eos": True, "temperature": 0}
        async with gate:
            answer = await post(bench.port, TEXT, {**body, "return_token_ids": True})
        statuses[answer.status] += 1
        if answer.status == 429:
            known = {"retry-after", "retry-after-ms"} <= set(answer.headers)
            outcome.expect(known, "a 429 without retry-after headers")
            outcome.expect(answer.json["error"]["code"] == "rate_limit_exceeded", "a 429 with another code")
        elif answer.status == 200:
            outcome.expect(answer.tokens == expected_output(prompt, 16), "an accepted answer is wrong")

    with Neighbour(bench.port, "refused") as probe:
        await asyncio.gather(*(one(index) for index in range(count)))
    refused = probe.seen["p99"]
    outcome.figures |= {
        "requests": count,
        "statuses": dict(statuses),
        "probes": probe.seen["count"],
        "refused_p99_ms": round(1e3 * refused, 1),
    }
    outcome.expect(set(statuses) <= {200, 429}, f"statuses {dict(statuses)}")
    outcome.expect(statuses[429] > 0, "no 429: the queue is unbounded")
    outcome.expect(not bench.timed or refused < REFUSED_WITHIN, f"p99 of a 429 is {1e3 * refused:.0f} ms")
    return outcome
