"""SIGTERM once, SIGTERM twice, SIGKILL."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Any

from bench.chaos.bench import Bench
from bench.chaos.clients import TEXT, Answer, ask, post
from bench.chaos.row import Outcome
from bench.chaos.server import TIMEOUT

UNREADY = 0.1
"""Seconds after SIGTERM until `/health` fails."""
LINES = 8
LONG: dict[str, Any] = {"prompt": "x" * 50, "max_tokens": 300, "ignore_eos": True, "stream": True}


async def life(bench: Bench) -> Outcome:
    """SIGTERM once: running requests finish, new ones are rejected. Twice: streams end now, with an error.
    SIGKILL: an accepted batch completes after the next start."""
    outcome = Outcome()
    await _once(bench, outcome)
    if bench.inject_fault and outcome.violations:
        return outcome  # one is enough, and each start takes long
    await bench.restart()
    await _twice(bench, outcome)
    await bench.restart()
    await _killed(bench, outcome)
    return outcome


async def _streams(bench: Bench) -> list[asyncio.Task[Answer]]:
    """Start streams; returns when all of them run or wait."""
    count = bench.count(200, 6)
    streams = [asyncio.create_task(post(bench.port, TEXT, LONG)) for _ in range(count)]
    async with asyncio.timeout(TIMEOUT):
        while True:
            now = await bench.server.call("progress")
            if now["running"] + now["waiting"] == count and now["output"]:
                return streams
            await asyncio.sleep(0.005)


async def _once(bench: Bench, outcome: Outcome) -> None:
    streams = await _streams(bench)
    port, begun = bench.port, time.monotonic()
    bench.server.signal(signal.SIGTERM)
    while await bench.server.health() == 200:
        pass
    unready = time.monotonic() - begun
    refused = await post(port, TEXT, LONG)
    outcome.expect(
        refused.status == 503 and "retry-after" in refused.headers,
        f"new work while draining: {refused.status}",
    )
    answers = await asyncio.gather(*streams)
    whole = sum(_finished(answer) for answer in answers)
    code = await bench.server.ended()
    outcome.figures |= {"streams": len(streams), "finished": whole, "unready_ms": round(1e3 * unready, 1)}
    outcome.expect(
        whole == len(answers), f"{len(answers) - whole} of {len(answers)} streams were cut by a drain"
    )
    outcome.expect(code == 0, f"exit code {code} after SIGTERM")
    outcome.expect(not bench.timed or unready < UNREADY, "health stayed ok after SIGTERM")


def _finished(answer: Answer) -> bool:
    events = answer.events
    if len(events) < 2 or events[-1] != "[DONE]" or "choices" not in events[-2]:
        return False
    return bool(events[-2]["choices"][0]["finish_reason"] == "length")


async def _twice(bench: Bench, outcome: Outcome) -> None:
    streams = await _streams(bench)
    for _ in range(2):
        bench.server.signal(signal.SIGTERM)
        await asyncio.sleep(0.01)  # two at once are one to the kernel
    answers = await asyncio.gather(*streams)
    explained = sum(_finished(answer) or _has_error(answer) for answer in answers)
    code = await bench.server.ended()
    outcome.figures["told_why"] = explained
    outcome.expect(explained == len(answers), f"{len(answers) - explained} streams ended without a reason")
    outcome.expect(code == 0, f"exit code {code} after two SIGTERM")


def _has_error(answer: Answer) -> bool:
    events = answer.events
    return answer.status == 503 or (len(events) > 1 and "error" in events[-2] and events[-1] == "[DONE]")


async def _killed(bench: Bench, outcome: Outcome) -> None:
    batch = await _batch(bench, bench.count(200, LINES))
    streams = await _streams(bench) if not bench.inject_fault else []
    bench.server.signal(signal.SIGKILL)
    await bench.server.ended()
    await asyncio.gather(*streams)
    begun = time.monotonic()
    await bench.restart()
    outcome.figures["restart_s"] = round(time.monotonic() - begun, 1)
    async with asyncio.timeout(TIMEOUT):
        while (now := (await ask(bench.port, "GET", f"/v1/batches/{batch}")).json)["status"] not in ENDS:
            await asyncio.sleep(0.05)
    counts = now["request_counts"]
    outcome.figures["batch"] = counts
    outcome.expect(
        now["status"] == "completed" and counts["completed"] == counts["total"],
        f"a batch that was accepted before SIGKILL: {now['status']}, {counts}",
    )


ENDS = ("completed", "failed", "expired", "cancelled")


async def _batch(bench: Bench, lines: int) -> str:
    """The id of a batch that has been accepted."""
    line = (
        b'{"custom_id":"%d","method":"POST","url":"/v1/completions","body":{"prompt":"a","max_tokens":8}}\n'
    )
    form = (
        b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="b.jsonl"\r\n\r\n'
        + b"".join(line % index for index in range(lines))
        + b"\r\n--x--\r\n"
    )
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    kept = (await ask(bench.port, "POST", "/v1/files", form, kind)).json
    body = {"input_file_id": kept["id"], "endpoint": TEXT, "completion_window": "24h"}
    return str((await post(bench.port, "/v1/batches", body)).json["id"])
