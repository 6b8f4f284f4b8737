"""Step period of four ranks under one GIL, with and without HTTP traffic.

    python -m bench.app.ranks

Each rank has a launch thread (100 µs of Python a step) and a waiter thread; steps release the GIL.
The step period is the time between the ends of two steps on rank 0's device. "quiet" runs the same
engine and scheduler with sinks that drop every piece; "http" streams each row to a client in another
process over 1,000 open connections, of which those without a row are idle.
"""

from __future__ import annotations

import asyncio
import statistics
from typing import Any

import numpy as np
import uvloop

from app.engine.job import Job, Piece
from app.text.tokenizer import Tokenizer
from bench.app import readers
from bench.app.paced import PacedExecutor
from bench.app.stack import Stack, capabilities, load_tokenizer
from bench.results import write
from core.request import SamplingParams

RANKS = 4
CONNECTIONS = 1000
SECONDS = 6.0
CASES = ((512, 20e-3), (32, 2e-3))
"""Rows, seconds of a step."""


async def measure(rows: int, seconds: float, http: bool, tokenizer: Tokenizer) -> dict[str, float]:
    """Step periods in milliseconds."""
    executor = PacedExecutor(capabilities(rows, tokenizer.vocab_size), seconds, RANKS)
    stack = Stack(executor, tokenizer)
    runner, port = await stack.start()
    tokens = int(SECONDS / seconds)
    if http:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(CONNECTIONS - rows)]
        process, pipe = readers.start(port, rows, tokens)
    else:
        runs = [await stack.submitter.start(_job(row, tokens), _drop) for row in range(rows)]
    engine = stack.engine
    while engine.load().running < rows:
        await asyncio.sleep(0.01)
    await asyncio.sleep(10 * seconds)
    first = len(executor.ended)
    while engine.load().running == rows:
        await asyncio.sleep(0.05)
    periods = 1e3 * np.diff(executor.ended[first:-2])
    if http:
        while not pipe.poll():
            await asyncio.sleep(0.01)
        pipe.recv()
        process.join()
        for _, writer in idle:
            writer.close()
    else:
        await asyncio.gather(*(run.wait() for run in runs))
    await runner.cleanup()
    engine.close()
    cut = statistics.quantiles(periods.tolist(), n=100)
    return {
        "p50_ms": round(cut[49], 3),
        "p90_ms": round(cut[89], 3),
        "p99_ms": round(cut[98], 3),
        "steps": len(periods),
    }


def _job(row: int, tokens: int) -> Job:
    prompt = np.asarray([300 + row, 5, 6, 7], np.int32)
    return Job(
        id=f"job-{row}",
        prompt=prompt,
        max_tokens=tokens,
        ignore_eos=True,
        sampling=SamplingParams(temperature=0.0),
    )


def _drop(index: int, piece: Piece) -> None:
    """A sink that drops every piece."""


def main() -> None:
    """Measure and write bench/results/ranks.json."""
    tokenizer = load_tokenizer()
    cases: list[dict[str, Any]] = []
    for rows, seconds in CASES:
        quiet = uvloop.run(measure(rows, seconds, False, tokenizer))
        http = uvloop.run(measure(rows, seconds, True, tokenizer))
        ratio = round(http["p90_ms"] / quiet["p90_ms"], 4)
        cases.append(
            {"rows": rows, "step_ms": 1e3 * seconds, "quiet": quiet, "http": http, "p90_ratio": ratio}
        )
    write("ranks", {"ranks": RANKS, "connections": CONNECTIONS, "cases": cases})


if __name__ == "__main__":
    main()
