"""A .gguf file on a CPU: Loom beside llama.cpp (`xllamacpp` of PyPI), with one thread and with two.

    python -m bench.llama --model FILE.gguf --python VENV/bin/python --name cpu-llama

Both servers are there all the time and answer in turn, so that other load of the machine meets both. Of the
rounds each row has the most tokens per second of wall time and, which other load changes least, the most per
second of the server's own CPU time; memory is the most that the process had (VmHWM), all of its KV cache
included.

Both get the same random token ids, by HTTP, and answer greedily without an end. `--python` is one that has
xllamacpp. llama.cpp keeps its KV cache in float16, Loom in float32.

    python -m bench.llama --drift --model FILE.gguf --name cpu-drift
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from app.offline import LLM
from bench.flags import command
from bench.results import write
from bench.servers import post

PORTS = {"loom": 8771, "llama.cpp": 8772}
TOKENS = 8192
"""Tokens of the KV cache."""
STREAMS = (1, 4, 8)
PROMPT, OUTPUT, LONG = 64, 32, 256
FILL = 1024
"""Tokens of each prompt that fills the KV cache, before peak memory is read at the end."""
WAIT = 300.0
"""Seconds that a server may take to start."""

DRIFTS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "as served": {},
        "bfloat16": {"quantization": "none", "dtype": "bfloat16"},
    }
)
"""Flags of the settings that are compared with float32."""

_PEER = """
import sys, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port = sys.argv[1], int(sys.argv[2])
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[3])
params.n_ctx, params.n_parallel, params.kv_unified = int(sys.argv[4]), int(sys.argv[5]), True
params.verbosity = 0
server = xllamacpp.Server(params)
while True:
    time.sleep(60)
"""


class Server(NamedTuple):
    """A running server, and the seconds until it was ready."""

    pid: int
    port: int
    ready_s: float

    def cpu_s(self) -> float:
        """CPU time so far, of all its threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def peak_mib(self) -> int:
        """Peak of the server's memory."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024

    def answer(self, prompt: Sequence[int], tokens: int) -> None:
        """Let the server generate `tokens` tokens behind a prompt."""
        fields = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        reply = json.loads(post(url, fields | {"cache_prompt": False}, 900))
        made = reply["usage"]["completion_tokens"]
        assert made == tokens, f"{made} of {tokens} tokens"


def main() -> None:
    """Measure and write results."""
    parser = command(__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--name", required=True, help="of the file in bench/results")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most-id", type=int, default=40_000)
    parser.add_argument(
        "--drift", action="store_true", help="compare log-probabilities with --quantization none"
    )
    args = parser.parse_args()
    if args.drift:
        drifts = {name: drift(args.model, **how) for name, how in DRIFTS.items()}
        write(args.name, {"model": args.model.name, "drift": drifts})
        return
    size, found = args.model.stat().st_size // 2**20, {}
    for threads in map(int, args.threads.split(",")):
        key = f"{threads} threads"
        found[key] = measure(args.model, args.python, threads, args.rounds, args.most_id)
        write(args.name, {"model": args.model.name, "file_mib": size, "kv_tokens": TOKENS, "found": found})


def drift(model: Path, **how: Any) -> dict[str, float]:
    """Return the absolute differences between the log-probabilities of a text with these settings and those
    of the dequantised model in float32."""
    text = (Path(__file__).parents[1] / "README.md").read_text()[:4000]
    found: list[list[float]] = []
    for each in (how, {"quantization": "none", "dtype": "float32"}):
        with LLM(str(model), device="cpu", kv_tokens=TOKENS, **each) as llm:
            [output] = llm.generate([text], max_tokens=1, echo=True, logprobs=0)
            found.append(output.choices[0].logprobs["token_logprobs"][1:-1])
    own, exact = (np.array(each) for each in found)
    off = np.abs(own - exact)
    return {
        "tokens": len(off),
        "mean": round(float(off.mean()), 4),
        "p99": round(float(np.quantile(off, 0.99)), 4),
        "largest": round(float(off.max()), 4),
        "mean_logprob": round(float(own.mean()), 4),
        "mean_logprob_dequantised": round(float(exact.mean()), 4),
    }


def measure(model: Path, python: str, threads: int, rounds: int, most: int) -> dict[str, object]:
    """Figures of both servers."""
    loom = [sys.executable, "-m", "app", "--model", str(model), "--log-level", "error"]
    loom += ["--port", str(PORTS["loom"]), "--kv-tokens", str(TOKENS), "--threads", str(threads)]
    peer = [python, "-c", _PEER, str(model), str(PORTS["llama.cpp"]), str(threads), str(TOKENS)]
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(started(command, PORTS[name], {"OMP_NUM_THREADS": str(threads)}))
            for name, command in (("loom", loom), ("llama.cpp", [*peer, str(max(STREAMS))]))
        }
        rates: dict[str, dict[str, list[tuple[float, float]]]] = {name: {} for name in servers}
        for seed in range(rounds):
            for streams in STREAMS:
                for name, server in servers.items():
                    each = rates[name].setdefault(f"{streams} streams", [])
                    each.append(rate(server, streams, PROMPT, OUTPUT, most, seed))
            for name, server in servers.items():
                each = rates[name].setdefault(f"prompt of {LONG}", [])
                each.append(rate(server, 1, LONG, 1, most, seed))
            print(threads, rates, flush=True)
        for server in servers.values():
            for seed in range(TOKENS // FILL):
                rate(server, 1, FILL - 1, 1, most, seed)
        return {
            name: {
                "ready_s": round(server.ready_s, 1),
                "peak_mib": server.peak_mib(),
                "tok_s": {row: round(max(wall for wall, _ in each), 1) for row, each in rates[name].items()},
                "tok_cpu_s": {
                    row: round(max(cpu for _, cpu in each), 1) for row, each in rates[name].items()
                },
            }
            for name, server in servers.items()
        }


@contextmanager
def started(command: Sequence[str], port: int, variables: Mapping[str, str]) -> Iterator[Server]:
    """A server that answers, with environment variables of its own."""
    begun = time.monotonic()
    process = subprocess.Popen(command, env={**os.environ, **variables})
    try:
        while True:
            assert process.poll() is None, "the server did not start"
            assert time.monotonic() - begun < WAIT, "the server takes too long to start"
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health")
                break
            except OSError:
                time.sleep(0.2)
        yield Server(process.pid, port, time.monotonic() - begun)
    finally:
        process.terminate()
        process.wait()


def rate(server: Server, streams: int, prompt: int, output: int, most: int, seed: int) -> tuple[float, float]:
    """Tokens per second of wall time and of the server's CPU time: of the outputs, or of a prompt whose
    output is one token."""
    rng = random.Random(seed * 100 + streams + output)
    prompts = [[rng.randrange(1000, most) for _ in range(prompt)] for _ in range(streams)]
    begun, cpu = time.monotonic(), server.cpu_s()
    with ThreadPoolExecutor(streams) as pool:
        list(pool.map(lambda each: server.answer(each, output), prompts))
    tokens = streams * (output if output > 1 else prompt)
    return tokens / (time.monotonic() - begun), tokens / (server.cpu_s() - cpu)


if __name__ == "__main__":
    main()
