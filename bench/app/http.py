"""Throughput of the HTTP path with a simulated device: tokens per second that one core streams.

    python -m bench.app.http

512 clients in another process, real tokenizer. Tokens per second of wall time
while all streams run, and per second of this process's CPU time: the figure per core, because the
client uses cores of the same machine. Lag is measured on the event loop every 5 ms.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

import uvloop

from bench.app import readers
from bench.app.paced import PacedExecutor
from bench.app.stack import Stack, capabilities, load_tokenizer
from bench.lag import Lag
from bench.results import write

CLIENTS = 512
TOKENS = 1200
STEPS = (1e-3, 4e-3, 5e-3, 6e-3)
"""Seconds of a simulated step: the first saturates the event loop, the others correspond to 128, 102 and 85
thousand tokens a second."""


async def measure(seconds: float) -> dict[str, Any]:
    """Figures of one run with simulated steps of `seconds`."""
    tokenizer = load_tokenizer()
    executor = PacedExecutor(capabilities(CLIENTS, tokenizer.vocab_size), seconds)
    stack = Stack(executor, tokenizer)
    runner, port = await stack.start()
    process, pipe = readers.start(port, CLIENTS, TOKENS)
    engine = stack.engine
    while engine.load().running < CLIENTS:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    lag = Lag()
    first, begun, cpu = engine.load().output_tokens, time.perf_counter(), time.process_time()
    while engine.load().running == CLIENTS:
        await asyncio.sleep(0.01)
    made = engine.load().output_tokens - first
    wall, used = time.perf_counter() - begun, time.process_time() - cpu
    lags = lag.stop()
    while not pipe.poll():
        await asyncio.sleep(0.01)
    events = pipe.recv()
    process.join()
    await runner.cleanup()
    engine.close()
    return {
        "step_ms": 1e3 * seconds,
        "tokens_per_s": round(made / wall),
        "tokens_per_cpu_s": round(made / used),
        "cpu_share": round(used / wall, 3),
        "loop_lag_p50_ms": round(1e3 * statistics.median(lags), 2),
        "loop_lag_p99_ms": round(1e3 * lags[int(len(lags) * 0.99)], 2),
        "events_received": events,
        "tokens_sent": CLIENTS * TOKENS,
    }


def main() -> None:
    """Measure and write bench/results/http.json."""
    runs = [uvloop.run(measure(seconds)) for seconds in STEPS]
    write("http", {"clients": CLIENTS, "tokens_each": TOKENS, "runs": runs})


if __name__ == "__main__":
    main()
