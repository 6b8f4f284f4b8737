"""A fault in every stage of a request."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

from app.process import HUNG
from bench.chaos.bench import Bench
from bench.chaos.clients import TEXT, Answer, ask, post
from bench.chaos.faults import STAGES
from bench.chaos.row import Outcome
from bench.chaos.server import POLL_INTERVAL, Polls

BODY: dict[str, Any] = {"ignore_eos": True, "temperature": 0, "return_token_ids": True}
FORM = (
    b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="b.jsonl"\r\n\r\n{}\r\n--x--\r\n'
)
BEFORE_QUEUE = {"compile": (500,), "tokenize": (500,), "disk": (507,), "fds": (0, 200)}
"""Stages before a request is queued, and the expected statuses of that request: others are not affected."""
WATCHDOG = 1.0
"""--watchdog-timeout of the row "hang", in seconds."""
HEALTH_DELAY = 1.0
"""Seconds until `/health` must report that the engine has failed."""


async def stages(bench: Bench) -> Outcome:
    """Affected requests get an error; none hangs, and none ends short with a regular finish reason."""
    outcome = Outcome()
    prompts = [f"stage {i} " * (1 + i % 3) for i in range(bench.count(40, 6))]
    own = {**BODY, "max_tokens": _tokens(bench)}
    alone = [await post(bench.port, TEXT, {**own, "prompt": prompt}) for prompt in prompts]
    expected = [answer.tokens for answer in alone]
    for stage in STAGES:
        if not bench.server.alive:
            await bench.restart()
        await _stage(bench, outcome, stage, dict(zip(prompts, expected, strict=True)))
        if bench.inject_fault and outcome.violations:
            break  # one is enough, and each that hangs takes long
    return outcome


async def _stage(bench: Bench, outcome: Outcome, stage: str, expected: dict[str, list[int]]) -> None:
    ends: Counter[str] = Counter()

    async def stream(prompt: str) -> None:
        own = {**BODY, "max_tokens": _tokens(bench), "prompt": prompt, "stream": True}
        ends[_end(await post(bench.port, TEXT, own), expected[prompt])] += 1

    streams = [asyncio.create_task(stream(prompt)) for prompt in expected]
    while (await bench.server.call("progress"))["running"] < len(streams) and not ends:
        await asyncio.sleep(POLL_INTERVAL / 50)
    await bench.server.call("inject", name=stage)
    probe = asyncio.create_task(_probe(bench, stage))
    # Without file descriptors no connection is accepted: the probe waits until there are some again.
    stuck = not await _ended(bench, streams if stage == "fds" else [*streams, probe])
    state = await _after(bench, outcome, stage, stuck, expected)
    if stuck:
        for task in (*streams, probe):
            task.cancel()
    probed = (await asyncio.gather(*streams, probe, return_exceptions=True))[-1]
    outcome.figures[stage] = {**ends, "server": state}
    outcome.expect(not stuck, f"{stage}: streams hang")
    wrong = ends.keys() - ({"whole"} if stage in BEFORE_QUEUE else {"whole", "told"})
    outcome.expect(not wrong, f"{stage}: streams end {sorted(wrong)}")
    if stage in BEFORE_QUEUE and isinstance(probed, Answer):
        outcome.figures[stage]["probe"] = probed.status
        outcome.expect(
            probed.status in BEFORE_QUEUE[stage], f"{stage}: {probed.status} {probed.body[-200:]!r}"
        )


async def hang(bench: Bench) -> Outcome:
    """A step that hangs: the watchdog ends the engine, and every stream gets an error."""
    outcome, ends = Outcome(), Counter[str]()
    prompts = [f"hang {i} " for i in range(bench.count(40, 6))]

    async def stream(prompt: str) -> None:
        own = {**BODY, "max_tokens": _tokens(bench), "prompt": prompt, "stream": True}
        ends[_end(await post(bench.port, TEXT, own), [])] += 1

    streams = [asyncio.create_task(stream(prompt)) for prompt in prompts]
    while (await bench.server.call("progress"))["running"] < len(streams):
        await asyncio.sleep(POLL_INTERVAL / 50)
    begun = time.monotonic()
    await bench.server.call("inject", name="launch hangs")
    # First the watchdog's timeout, then the limit of polls without progress.
    await asyncio.sleep(WATCHDOG)
    if not await _ended(bench, streams):
        outcome.expect(False, "streams still wait for the hung device")
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        await bench.server.call("undo")  # releases the step, so that the server can end
        return outcome
    seconds = time.monotonic() - begun
    outcome.figures |= {**ends, "noticed_after_s": round(seconds, 1)}
    outcome.expect(not bench.timed or seconds < 2 * WATCHDOG, f"the hang was detected after {seconds:.1f} s")
    outcome.expect(ends.keys() == {"told"}, f"streams end {dict(ends)}")
    code = await bench.server.ended()
    outcome.expect(code == HUNG, f"exit code {code}, expected {HUNG}")
    return outcome


def _tokens(bench: Bench) -> int:
    """Tokens of an answer that is still under way when a fault is injected."""
    return bench.count(200, 80)


async def _probe(bench: Bench, stage: str) -> Answer:
    """Send a request that goes through the stage."""
    if stage == "disk":
        kind = {"Content-Type": "multipart/form-data; boundary=x"}
        return await ask(bench.port, "POST", "/v1/files", FORM, kind)
    return await post(bench.port, TEXT, {"prompt": "p" * 1000, "max_tokens": 4, "regex": "[a-z]{3}"})


def _end(answer: Answer, expected: list[int]) -> str:
    """How a stream ended: complete ("whole"), with an error ("told"), or with one of the violations."""
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
    """Wait for all `tasks`; False once there is no progress."""
    polls = Polls()
    while not all(task.done() for task in tasks):
        try:
            now = await bench.server.call("progress")
        except RuntimeError:  # the server has ended
            now = {}
        if not await polls.again((now.get("steps"), now.get("output"), sum(task.done() for task in tasks))):
            return False
    return True


async def _after(
    bench: Bench, outcome: Outcome, stage: str, stuck: bool, expected: dict[str, list[int]]
) -> str:
    """State of the server after the fault. A failed one must report it on `/health` and exit with an error
    code; one that goes on must answer correctly."""
    begun = time.monotonic()
    while (
        bench.server.alive and await bench.server.health() == 200 and time.monotonic() - begun < HEALTH_DELAY
    ):
        if not (await bench.server.call("progress"))["failure"]:
            break
    if bench.server.alive and await bench.server.health() == 200:
        await bench.server.call("undo")
        await bench.inject()
        prompt = next(iter(expected))
        if stuck:
            await bench.server.kill()
            return "healthy, but stuck"
        answer = await post(bench.port, TEXT, {**BODY, "max_tokens": _tokens(bench), "prompt": prompt})
        tokens = answer.tokens if answer.status == 200 else answer.body[-200:]
        outcome.expect(tokens == expected[prompt], f"{stage}: a request after it gets {tokens!r}")
        return "goes on"
    code = await bench.server.ended()
    outcome.expect(code not in (0, None), f"{stage}: exit code {code}")
    return f"ends with {code}"
