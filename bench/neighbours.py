"""Cost of one client's options for other clients: `python -m bench.neighbours --model DIR --tokenizer DIR`.

Plain greedy streams run beside one intruder at a time. Runs with and without the intruder's option are
interleaved, so that drift affects both. Each run gives the throughput and the p99 inter-token latency of the
plain streams, over the time in which all of them and the intruder stream. The result has the medians of
`--rounds` pairs of runs, and two figures with their limits:

    slower_share   median relative loss of throughput            0.03
    p99_more_ms    median increase of p99 inter-token latency    3.0

Starts a server with random weights, or measures the one at `--url`, which needs `--logit-processor
favour=bench.neighbours:favour` for the intruder "processor". Bias: the client shares the server's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np
import uvloop

from bench.load.client import Client, Target
from bench.load.prompts import PreparedRequest, Source
from bench.load.records import Record
from bench.load.workloads import ROWS, Workload
from bench.results import write
from bench.table import SERVER, Server

SLOWER_SHARE, P99_MORE_MS = 0.03, 3.0

_NOTHING: Mapping[str, Any] = MappingProxyType({})

MIN_TOKENS = 32
"""`min_tokens` of the intruder of this name: at most --output-len."""

_SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": msgspec.json.decode(ROWS)}}


class Intruder(NamedTuple):
    """A stream beside the plain ones: the fields of its option, and its endpoint."""

    option: Mapping[str, Any]
    endpoint: str = "completions"


INTRUDERS: Mapping[str, Intruder] = MappingProxyType(
    {
        "logprobs": Intruder({"logprobs": 5}),
        "top_logprobs": Intruder({"logprobs": True, "top_logprobs": 20}, "chat"),
        "logit_bias": Intruder({"logit_bias": {str(token): -1.0 for token in range(1, 31)}}),
        "processor": Intruder({"custom_logit_processor": "favour"}),
        "min_tokens": Intruder({"min_tokens": MIN_TOKENS, "stop_token_ids": list(range(1, 20))}),
        "penalties": Intruder({"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}),
        "json_schema": Intruder({"response_format": _SCHEMA}),
    }
)


def favour(logits: Any, output: list[int], params: dict[str, Any]) -> None:
    """An example of an operator's logit processor."""
    logits[16:32] += 1.0


class Figures(NamedTuple):
    """Throughput and p99 inter-token latency of the plain streams of one run."""

    tok_s: float
    p99_ms: float


def figures(streams: Sequence[Record], intruders: Sequence[Record]) -> Figures:
    """Figures over the time in which all `streams` and an intruder run. Raises `RuntimeError` if a stream
    failed or they never ran all together."""
    for record in (*streams, *intruders):
        if record.bad is not None:
            raise RuntimeError(f"a stream failed: {record.bad} {record.detail}")
    began = max(min(each.times[0] for each in intruders), *(each.times[0] for each in streams))
    ended = min(max(each.times[-1] for each in intruders), *(each.times[-1] for each in streams))
    arrived = [np.array(each.times) for each in streams]
    inside = [times[(times >= began) & (times <= ended)] for times in arrived]
    tokens = sum(len(times) - 1 for times in inside)
    if ended <= began or tokens < len(streams):
        raise RuntimeError("the streams did not run together: increase --output-len")
    gaps = np.concatenate([np.diff(times) for times in inside])
    return Figures(tokens / (ended - began), float(np.percentile(gaps, 99)) * 1e3)


def verdict(pairs: Sequence[tuple[Figures, Figures]]) -> dict[str, Any]:
    """Medians over pairs of runs without and with the option, and whether they are within the limits."""
    slower = median(1 - own.tok_s / plain.tok_s for plain, own in pairs)
    more = median(own.p99_ms - plain.p99_ms for plain, own in pairs)
    found: dict[str, Any] = {"slower_share": round(slower, 4), "p99_more_ms": round(more, 2)}
    for name, runs in zip(("without", "with"), zip(*pairs, strict=True), strict=True):
        found[name] = {
            "tok_s": round(median(run.tok_s for run in runs), 1),
            "p99_ms": round(median(run.p99_ms for run in runs), 2),
        }
    return found | {"holds": slower <= SLOWER_SHARE and more <= P99_MORE_MS}


class Neighbours:
    """Runs against one server. Owner: event loop."""

    def __init__(self, target: Target, model: str, work: Workload) -> None:
        self._clients = {endpoint: Client(target, endpoint) for endpoint in ("completions", "chat")}
        self._plain = Source(work, model)
        text = msgspec.structs.replace(work, endpoint="chat", prompt_kind="text")
        self._sources = {"completions": self._plain, "chat": Source(text, model)}
        self._streams = work.requests

    async def run(self, intruder: Intruder, option: bool) -> Figures:
        """Run all plain streams beside an intruder, which sends its next request when its answer ends."""
        others: list[Record] = []
        extra = intruder.option if option else {}
        async with asyncio.TaskGroup() as group:
            plain = [group.create_task(self._send("completions", i)) for i in range(self._streams)]
            while not any(task.done() for task in plain):
                others.append(await self._send(intruder.endpoint, self._streams, extra))
        return figures([task.result() for task in plain], others)

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients.values():
            client.close()

    async def _send(self, endpoint: str, index: int, extra: Mapping[str, Any] = _NOTHING) -> Record:
        request = self._sources[endpoint].request(index)
        if extra:
            body = msgspec.json.decode(request.body) | extra
            request = PreparedRequest(
                request.index, request.turn, msgspec.json.encode(body), None, request.prompt
            )
        record, _ = await self._clients[endpoint].send(request)
        return record


async def measure(url: str, names: Sequence[str], rounds: int, work: Workload) -> dict[str, Any]:
    """The figures of every intruder of `names`."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
        model = msgspec.json.decode(answer.read())["data"][0]["id"]
    neighbours = Neighbours(Target.of(url), model, work)
    gc.disable()  # a garbage collection of the client would show as a gap
    try:
        return {name: await _pairs(neighbours, name, rounds) for name in names}
    finally:
        gc.enable()
        neighbours.close()


async def _pairs(neighbours: Neighbours, name: str, rounds: int) -> dict[str, Any]:
    gc.collect()
    await neighbours.run(INTRUDERS[name], True)  # compiles a grammar, fills the prefix cache
    pairs = []
    for turn in range(rounds):
        order = (False, True) if turn % 2 == 0 else (True, False)
        runs = {option: await neighbours.run(INTRUDERS[name], option) for option in order}
        pairs.append((runs[False], runs[True]))
    found = verdict(pairs)
    print(name, found, flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write bench/results/NAME.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="of a running server; default: start one with the remaining flags")
    parser.add_argument("--name", default="neighbours", help="of the file under bench/results")
    parser.add_argument("--intruders", default=",".join(INTRUDERS), help="separated by commas")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=512)
    parser.add_argument("--vocab-high", type=int, default=90_000)
    args, flags = parser.parse_known_args(argv)
    names = args.intruders.split(",")
    if unknown := set(names) - INTRUDERS.keys():
        parser.error(f"--intruders: {', '.join(sorted(unknown))} unknown, choose from {', '.join(INTRUDERS)}")
    work = Workload(
        name="neighbours", requests=args.streams, concurrency=args.streams, input_len=args.input_len,
        output_len=args.output_len, vocab_low=min(1_000, args.vocab_high // 2), vocab_high=args.vocab_high,
    )  # fmt: skip

    def found(url: str) -> dict[str, Any]:
        return uvloop.run(measure(url, names, args.rounds, work))

    if args.url:
        results = found(args.url)
    else:
        with tempfile.TemporaryDirectory() as folder:
            processor = ("--logit-processor", "favour=bench.neighbours:favour")
            server = Server([*SERVER, *processor, *flags], Path(folder) / "log")
            try:
                server.wait_ready(300)
                results = found(server.url)
            finally:
                server.stop()
    sizes = {"streams": args.streams, "rounds": args.rounds, "output_len": args.output_len}
    write(args.name, {**sizes, "input_len": args.input_len, "server_flags": flags, "intruders": results})


if __name__ == "__main__":
    main()
