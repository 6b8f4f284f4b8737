"""A fault in every stage of a request's way."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

from app.server import HUNG
from bench.chaos.bench import Bench
from bench.chaos.clients import TEXT, Answer, ask, post
from bench.chaos.faults import STAGES
from bench.chaos.row import Found
from bench.chaos.server import LOOK, STILL

TOKENS = 200
BODY: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
FORM = (
    b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="b.jsonl"\r\n\r\n{}\r\n--x--\r\n'
)
AT_THE_EDGE = {"compile": (500,), "tokenize": (500,), "disk": (507,), "fds": (0, 200)}
"""Stages of one request before any work is queued, and what that one is told: others do not notice."""
WATCHDOG = 1.0
"""Seconds that a step may take in the row about hangs: its --watchdog-timeout."""
TOLD = 1.0
"""Seconds until health must tell that the engine has failed."""


async def stages(bench: Bench) -> Found:
    """Whoever loses work is told; nobody waits for ever, and nobody gets less and is told it is all."""
    found = Found()
    prompts = [f"stage {i} " * (1 + i % 3) for i in range(bench.count(40, 6))]
    alone = [await post(bench.port, TEXT, {**BODY, "prompt": prompt}) for prompt in prompts]
    expected = [answer.tokens for answer in alone]
    for stage in STAGES:
        if not bench.server.alive:
            await bench.restart()
        await _stage(bench, found, stage, dict(zip(prompts, expected, strict=True)))
        if bench.broken and found.wrong:
            break  # each that hangs takes its time
    return found


async def _stage(bench: Bench, found: Found, stage: str, expected: dict[str, list[int]]) -> None:
    ends: Counter[str] = Counter()

    async def stream(prompt: str) -> None:
        answer = await post(bench.port, TEXT, {**BODY, "prompt": prompt, "stream": True})
        ends[_end(answer, expected[prompt])] += 1

    streams = [asyncio.create_task(stream(prompt)) for prompt in expected]
    while (await bench.server.tell("progress"))["running"] < len(streams) and not ends:
        await asyncio.sleep(LOOK / 50)
    await bench.server.tell("fault", name=stage)
    probe = asyncio.create_task(_probe(bench, stage))
    # Without descriptors nobody is let in: a probe waits until there are some again.
    stuck = not await _ended(bench, streams if stage == "fds" else [*streams, probe])
    state = await _after(bench, found, stage, stuck, expected)
    if stuck:
        for task in (*streams, probe):
            task.cancel()
    told = (await asyncio.gather(*streams, probe, return_exceptions=True))[-1]
    found.figures[stage] = {**ends, "server": state}
    found.expect(not stuck, f"{stage}: streams hang for good")
    wrong = ends.keys() - ({"whole"} if stage in AT_THE_EDGE else {"whole", "told"})
    found.expect(not wrong, f"{stage}: streams end {sorted(wrong)}")
    if stage in AT_THE_EDGE and isinstance(told, Answer):
        found.figures[stage]["probe"] = told.status
        found.expect(told.status in AT_THE_EDGE[stage], f"{stage}: {told.status} {told.body[-200:]!r}")


async def hang(bench: Bench) -> Found:
    """A step that never comes back: the watchdog ends the engine, and whoever waits for a token is told."""
    found, ends = Found(), Counter[str]()
    prompts = [f"hang {i} " for i in range(bench.count(40, 6))]

    async def stream(prompt: str) -> None:
        ends[_end(await post(bench.port, TEXT, {**BODY, "prompt": prompt, "stream": True}), [])] += 1

    streams = [asyncio.create_task(stream(prompt)) for prompt in prompts]
    while (await bench.server.tell("progress"))["running"] < len(streams):
        await asyncio.sleep(LOOK / 50)
    begun = time.monotonic()
    await bench.server.tell("fault", name="launch hangs")
    # The watchdog's own limit comes first, then that of nothing moving.
    await asyncio.sleep(WATCHDOG)
    if not await _ended(bench, streams):
        found.expect(False, "streams wait for a device that hangs")
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        await bench.server.tell("mend")
        await bench.server.kill()
        return found
    seconds = time.monotonic() - begun
    found.figures |= {**ends, "noticed_after_s": round(seconds, 1)}
    found.expect(not bench.timed or seconds < 2 * WATCHDOG, f"a hang was noticed after {seconds:.1f} s")
    found.expect(ends.keys() == {"told"}, f"streams end {dict(ends)}")
    code = await bench.server.ended()
    found.expect(code == HUNG, f"the process ends with code {code}, not {HUNG}")
    return found


async def _probe(bench: Bench, stage: str) -> Answer:
    """A request that goes through the stage."""
    if stage == "disk":
        kind = {"Content-Type": "multipart/form-data; boundary=x"}
        return await ask(bench.port, "POST", "/v1/files", FORM, kind)
    return await post(bench.port, TEXT, {"prompt": "p" * 1000, "max_tokens": 4, "regex": "[a-z]{3}"})


def _end(answer: Answer, expected: list[int]) -> str:
    """How a stream ended."""
    if answer.status != 200:
        return "told" if answer.status >= 500 or answer.status == 0 else f"with {answer.status}"
    events = answer.events
    if events[-1:] != ["[DONE]"]:
        return "without an end"
    if any("error" in event for event in events[:-1]):
        return "told"
    if answer.tokens == expected:
        return "whole"
    return "short" if len(answer.tokens) < len(expected) else "wrong"


async def _ended(bench: Bench, tasks: list[asyncio.Task[Any]]) -> bool:
    """Wait for all of them; False once nothing moves any more."""
    before, still = None, 0
    while not all(task.done() for task in tasks):
        try:
            now = await bench.server.tell("progress")
        except RuntimeError:  # it has ended; what it owed has been sent, or never will be
            now = {}
        moved = now.get("steps"), now.get("output"), sum(task.done() for task in tasks)
        still = still + 1 if moved == before else 0
        if still == STILL:
            return False
        before = moved
        await asyncio.sleep(LOOK)
    return True


async def _after(bench: Bench, found: Found, stage: str, stuck: bool, expected: dict[str, list[int]]) -> str:
    """What became of the server. One that failed ends with an error code and says so until then; one that
    goes on is whole."""
    begun = time.monotonic()
    while bench.server.alive and await bench.server.health() == 200 and time.monotonic() - begun < TOLD:
        if not (await bench.server.tell("progress"))["failure"]:
            break
    if bench.server.alive and await bench.server.health() == 200:
        await bench.server.tell("mend")
        await bench.seed()
        prompt = next(iter(expected))
        if stuck:
            await bench.server.kill()
            return "ok in words"
        answer = await post(bench.port, TEXT, {**BODY, "prompt": prompt})
        tokens = answer.tokens if answer.status == 200 else answer.body[-200:]
        found.expect(tokens == expected[prompt], f"{stage}: a request after it gets {tokens!r}")
        return "goes on"
    code = await bench.server.ended()
    found.expect(code not in (0, None), f"{stage}: the process ends with code {code}")
    return f"ends with {code}"
