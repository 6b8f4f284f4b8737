"""SmolLM2 on the CPU: Loom over HTTP against `transformers` generate, and TTFT with a cached prefix.

    python -m bench.cpu            alone, into bench/results/cpu.json
    python -m bench.cpu --loaded   beside busy processes, into bench/results/cpu-loaded.json
    python -m bench.cpu --dtypes   float32 and bfloat16, into bench/results/cpu-dtypes.json

`--loaded`: one stream, alone and beside one busy process and one for each core, with the server's threads as
they are by default, with those that spin as long as the OpenMP library has them by itself (300,000 looks),
and with threads that do not spin (`OMP_WAIT_POLICY=PASSIVE`).

Both run fp32, prompts of random token ids and the same number of greedy tokens, one after the other on the
same cores. Bias: `transformers` has random weights of the same shapes, which cost the same; it runs without
HTTP, and Loom's client uses a share of the cores. `transformers` serves concurrent requests one after the
other, so its throughput is that of a single stream.

`--dtypes`: servers of one thread each, that answer in turn, as `bench.llama` compares them: tokens per second
of the server's CPU time, which other load changes least.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np

from app.checkpoint.checkpoint import resolve
from bench import llama
from bench.flags import command
from bench.llama import LONG, STREAMS, TOKENS, rate, started
from bench.load.client import Target
from bench.load.pool import Job, Pool
from bench.load.records import Record
from bench.load.workloads import Workload
from bench.results import write
from core.config import ModelConfig

PORT = 8765
PROMPT, OUTPUT = 64, 128
SHORT = 48
"""Tokens of an answer beside busy processes."""
ROUNDS = 3
ONE = {"concurrency": 1, "requests": 1}
PREFIX, SUFFIX = 2000, 16
WAITS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "default": {},
        "300,000 looks": {"GOMP_SPINCOUNT": "300000"},
        "no spinning": {"OMP_WAIT_POLICY": "PASSIVE"},
    }
)
"""How a server's threads wait for work, by environment variables."""
_COMMAND = (sys.executable, "-m", "app", "--log-level", "error", "--quantization", "none")
"""A server of the dequantised model: its file has 4 bits."""
IDS = {"vocab_low": 1000, "vocab_high": 40_000}


def main() -> None:
    """Measure and write results."""
    parser = command(__doc__)
    parser.add_argument("--loaded", action="store_true", help="beside busy processes")
    parser.add_argument("--dtypes", action="store_true", help="float32 and bfloat16")
    args = parser.parse_args()
    if args.dtypes:
        write("cpu-dtypes", {"model": "SmolLM2-135M-Instruct, --quantization none", "found": _dtypes()})
    elif args.loaded:
        write("cpu-loaded", {"model": "SmolLM2-135M-Instruct, fp32", "tok_s": _loaded()})
    else:
        _alone()


def _loaded() -> dict[str, dict[str, float]]:
    """Tokens per second of one stream, median, by how threads wait and what runs beside it."""
    found: dict[str, dict[str, float]] = {}
    for name, variables in WAITS.items():
        found[name] = {}
        with _server(variables):
            _load("warm", output_len=SHORT, **ONE)
            for busy in (0, 1, os.cpu_count() or 1):
                with _busy(busy):
                    rates = [_rate(_load("single", output_len=SHORT, **ONE)) for _ in range(ROUNDS)]
                found[name][f"{busy} busy"] = round(statistics.median(rates), 1)
                print(name, found[name], flush=True)
    return found


def _dtypes() -> dict[str, dict[str, object]]:
    """Returns the best round of each dtype, and the server's peak memory."""
    one = {"OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        servers = {
            dtype: stack.enter_context(started([*_COMMAND, "--port", str(port), *more, dtype], port, one))
            for dtype, port in (("float32", PORT), ("bfloat16", PORT + 1))
            for more in [("--kv-tokens", str(TOKENS), "--threads", "1", "--dtype")]
        }
        rates: dict[str, dict[str, float]] = {dtype: {} for dtype in servers}
        for seed in range(ROUNDS):
            for streams, prompt, output in [*((n, PROMPT, llama.OUTPUT) for n in STREAMS), (1, LONG, 1)]:
                row = f"{streams} streams" if output > 1 else f"prompt of {prompt}"
                for dtype, server in servers.items():
                    _, found = rate(server, streams, prompt, output, IDS["vocab_high"], seed)
                    rates[dtype][row] = max(round(found, 1), rates[dtype].get(row, 0.0))
        return {
            dtype: {"peak_mib": server.peak_mib(), "tok_cpu_s": rates[dtype]}
            for dtype, server in servers.items()
        }


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """Run `count` processes that compute all the time."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def _alone() -> None:
    peer = statistics.median(_transformers())
    with _server():
        single = [_rate(_load("single", concurrency=1, requests=1)) for _ in range(ROUNDS)]
        eight = [_rate(_load("eight", concurrency=8, requests=8)) for _ in range(ROUNDS)]
        cold, warm = zip(*(_prefix(seed) for seed in range(ROUNDS)), strict=True)
    one, total = statistics.median(single), statistics.median(eight)
    write(
        "cpu",
        {
            "model": "SmolLM2-135M-Instruct, fp32",
            "prompt_tokens": PROMPT,
            "output_tokens": OUTPUT,
            "transformers_tok_s": round(peer, 1),
            "loom_single_tok_s": round(one, 1),
            "loom_eight_tok_s": round(total, 1),
            "single_ratio": round(one / peer, 2),
            "eight_ratio": round(total / peer, 2),
            "shared_prefix_tokens": PREFIX,
            "ttft_cold_ms": round(statistics.median(cold), 1),
            "ttft_cached_ms": round(statistics.median(warm), 1),
            "ttft_ratio": round(statistics.median(cold) / statistics.median(warm), 1),
        },
    )


def _transformers() -> list[float]:
    """Tokens per second of greedy generate, in a separate process."""
    config = json.dumps(resolve(ModelConfig(), print).config)
    done = subprocess.run(
        [sys.executable, "-c", _PEER, config], stdout=subprocess.PIPE, text=True, check=True
    )
    return [float(line) for line in done.stdout.split()]


_PEER = f"""
import json, sys, time, torch
from transformers import LlamaConfig, LlamaForCausalLM
config = json.loads(sys.argv[1])
model = LlamaForCausalLM._from_config(LlamaConfig(**config), dtype=torch.float32).eval()
torch.manual_seed(0)
for round in range({ROUNDS} + 1):
    ids = torch.randint(1000, 40000, (1, {PROMPT}))
    begun = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                             min_new_tokens={OUTPUT}, max_new_tokens={OUTPUT}, pad_token_id=0)
    assert out.shape[1] == {PROMPT + OUTPUT}
    if round:
        print({OUTPUT} / (time.perf_counter() - begun))
"""


def _server(variables: Mapping[str, str] = MappingProxyType({})) -> AbstractContextManager[llama.Server]:
    command = [*_COMMAND, "--port", str(PORT), "--dtype", "float32"]  # as the peer
    return started(command, PORT, variables)


def _load(name: str, **options: Any) -> list[Record]:  # the workload's own fields
    options = {"input_len": PROMPT, "output_len": OUTPUT, "seed": time.time_ns() % 10**6, **IDS, **options}
    job = Job(Target.of(f"http://127.0.0.1:{PORT}"), Workload(name=name, **options), "", processes=1)
    records = Pool(job).run().records
    assert all(record.bad is None for record in records), "a request failed"
    return records


def _rate(records: list[Record]) -> float:
    """Output tokens per second of wall time."""
    begun, ended = min(r.sent for r in records), max(r.end for r in records)
    return float(sum(r.out for r in records) / (ended - begun))


def _prefix(seed: int) -> tuple[float, float]:
    """Time to first token in ms of two prompts with the same prefix: without and with a cache hit."""
    rng = np.random.default_rng(seed)
    prefix = rng.integers(1000, 40_000, PREFIX).tolist()
    times = [_first_token(prefix + rng.integers(1000, 40_000, SUFFIX).tolist()) for _ in range(2)]
    return times[0], times[1]


def _first_token(prompt: list[int]) -> float:
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    begun = time.perf_counter()
    urllib.request.urlopen(request).read()
    return 1e3 * (time.perf_counter() - begun)


if __name__ == "__main__":
    main()
