"""Cost of one client's options for other clients: `python -m bench.neighbours --model DIR --tokenizer DIR`.

Plain greedy streams run beside one intruder at a time. Runs with and without the intruder's option are
interleaved, so that drift affects both; without `n`, beams and embeddings the intruder sends as many requests
of the same length instead. Each run gives the throughput and the p99 inter-token latency of the
plain streams, over the time in which all of them and the intruder run. The result has the medians of
`--rounds` pairs of runs, and two figures with their limits:

    slower_share   median relative loss of throughput            0.03
    p99_more_ms    median increase of p99 inter-token latency    3.0

Then callers send prompts of --long tokens, each the next one when it has the first token, and the figures are

    speed   throughput of the streams over that without callers              one 0.5   four 0.25
    times   median first token of the callers over that without streams     one 3     four 1.5

At last a caller sends prompts of --short tokens, first beside the streams, then beside a caller of long ones
too:

    times   median first token of the short prompts over that without long ones     2

Starts a server with random weights, or measures the one at `--url`, which needs `--logit-processor
favour=bench.neighbours:favour` for the intruder "processor". Bias: the client shares the server's cores.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np
import uvloop

from bench.flags import add_name, add_sizes, command, sized
from bench.load import server
from bench.load.client import Client, Target
from bench.load.prompts import Source, changed
from bench.load.records import Record
from bench.load.workloads import ROWS, Workload
from bench.results import write
from bench.servers import SERVER, post, serving

SLOWER_SHARE, P99_MORE_MS = 0.03, 3.0

_NOTHING: Mapping[str, Any] = MappingProxyType({})

WORK_TOKENS = 500
"""Prompt tokens of work that is posted."""

ALONE = 5
"""Requests of each caller without streams."""

MIN_TOKENS = 32
"""`min_tokens` of the intruder of this name: at most --output-len."""

_SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": msgspec.json.decode(ROWS)}}

_TEXT = {"type": "string", "maxLength": 2_000}
_OBJECT = {"type": "object", "properties": {"text": _TEXT}, "required": ["text"]}
_BOUNDED = {"type": "json_schema", "json_schema": {"name": "answer", "schema": _OBJECT}}

_SHORT: Mapping[str, Any] = MappingProxyType({"max_tokens": 32, "temperature": 0.0, "ignore_eos": True})
_PROMPT: Mapping[str, Any] = MappingProxyType({"max_tokens": 1, "temperature": 0.0})


class Intruder(NamedTuple):
    """A stream beside the plain ones: the fields of its option, and its endpoint.

    With a `work` it is no stream: it posts completions with these fields and a new prompt each time, one with
    the option, or `instead` as many without it, and reads whole answers. Without the option there are
    completions in place of embeddings.
    """

    option: Mapping[str, Any]
    endpoint: str = "completions"
    work: Mapping[str, Any] | None = None
    instead: int = 1


INTRUDERS: Mapping[str, Intruder] = MappingProxyType(
    {
        "logprobs": Intruder({"logprobs": 5}),
        "top_logprobs": Intruder({"logprobs": True, "top_logprobs": 20}, "chat"),
        "logit_bias": Intruder({"logit_bias": {str(token): -1.0 for token in range(1, 31)}}),
        "processor": Intruder({"custom_logit_processor": "favour"}),
        "min_tokens": Intruder({"min_tokens": MIN_TOKENS, "stop_token_ids": list(range(1, 20))}),
        "penalties": Intruder({"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}),
        "json_schema": Intruder({"response_format": _SCHEMA}),
        "bounded_string": Intruder({"response_format": _BOUNDED}),
        "n": Intruder({"n": 8}, work=_SHORT, instead=8),
        "beams": Intruder({"use_beam_search": True, "n": 4}, work={**_PROMPT, "max_tokens": 16}, instead=4),
        "echo": Intruder({"echo": True, "logprobs": 1}, work=_PROMPT),
        "hidden_states": Intruder({"return_hidden_states": True}, work=_PROMPT),
        "embeddings": Intruder({}, "embeddings", work=_PROMPT),
    }
)


class Callers(NamedTuple):
    """Callers of long prompts: their number, and the limits of the two figures."""

    number: int
    speed: float
    times: float


LONG: Mapping[str, Callers] = MappingProxyType(
    {"one_caller": Callers(1, 0.5, 3.0), "four_callers": Callers(4, 0.25, 1.5)}
)


SHORT_TIMES = 2.0
"""Limit of the first token of short prompts beside a caller of long ones."""


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

    def __init__(self, url: str, model: str, work: Workload, long: Workload, short: Workload) -> None:
        self._url, self._model = url, model
        self._clients = {each: Client(Target.of(url), each) for each in ("completions", "chat")}
        self._plain = Source(work, model)
        self._long, self._short = Source(long, model), Source(short, model)
        text = msgspec.structs.replace(work, endpoint="chat", prompt_kind="text")
        self._sources = {"completions": self._plain, "chat": Source(text, model)}
        self._streams = work.requests
        self._sent = 0
        self._prompts = np.random.default_rng(0)
        self._vocab = work.vocab_low, work.vocab_high

    async def run(self, intruder: Intruder, option: bool) -> Figures:
        """Run all plain streams beside an intruder, which sends its next request when its answer ends."""
        extra = intruder.option if option else {}

        async def other() -> Record:
            if intruder.work is None:
                return await self._send(intruder.endpoint, self._streams, extra)
            return await self._post_all(intruder, option)

        streams, others = await self._beside(other)
        return figures(streams, others)

    async def beside(self, callers: int) -> tuple[Figures, list[float]]:
        """Run all plain streams beside `callers` callers of long prompts. Returns the seconds to the callers'
        first tokens too, of the requests sent while all streams ran."""
        streams, others = await self._beside(*[self._call] * callers)
        began, ended = max(each.times[0] for each in streams), min(each.times[-1] for each in streams)
        firsts = [each for each in others if each.sent >= began and each.times[0] <= ended]
        # Without callers the streams' own time counts.
        found = figures(streams, others or [Record(index=0, times=[began, ended])])
        return found, [each.times[0] - each.sent for each in firsts]

    async def short_firsts(self, callers: int) -> list[float]:
        """Seconds to the first tokens of short prompts, one after the other, beside all plain streams and so
        many callers of long ones, all of which have begun."""
        short: list[Record] = []

        async def call() -> Record:
            short.append(await self._call(self._short))
            return short[-1]

        streams, others = await self._beside(call, *[self._call] * callers)
        began = max(each.times[0] for each in streams)
        if callers:
            began = max(began, min(each.times[0] for each in others if each not in short))
        return [each.times[0] - each.sent for each in short if each.sent >= began]

    async def callers_alone(self, callers: int) -> list[float]:
        """Seconds to the first tokens of `callers` callers, who send `ALONE` requests each."""

        async def several() -> list[Record]:
            return [await self._call() for _ in range(ALONE)]

        records = await asyncio.gather(*(several() for _ in range(callers)))
        return [each.times[0] - each.sent for listed in records for each in listed]

    async def _beside(self, *others: Callable[[], Awaitable[Record]]) -> tuple[list[Record], list[Record]]:
        """Run all plain streams, and the others again and again until one stream has ended."""
        found: list[Record] = []

        async def again(other: Callable[[], Awaitable[Record]]) -> None:
            while not any(task.done() for task in plain):
                found.append(await other())

        async with asyncio.TaskGroup() as group:
            plain = [group.create_task(self._send("completions", i)) for i in range(self._streams)]
            for other in others:
                group.create_task(again(other))
        return [task.result() for task in plain], found

    async def _call(self, source: Source | None = None) -> Record:
        """A prompt of `source`, by default a long one, that none sent before."""
        self._sent += 1
        record, _ = await self._clients["completions"].send((source or self._long).request(self._sent))
        if record.bad is not None:
            raise RuntimeError(f"a prompt failed: {record.bad} {record.detail}")
        return record

    async def _post_all(self, intruder: Intruder, option: bool) -> Record:
        """Run an intruder's work once. The record's times are its start and its end."""
        assert intruder.work is not None
        prompt = self._prompts.integers(*self._vocab, WORK_TOKENS).tolist()
        path, body = "completions", {"model": self._model, "prompt": prompt, **intruder.work}
        if option and intruder.endpoint == "embeddings":
            path, body = "embeddings", {"model": self._model, "input": prompt}
        elif option:
            body |= intruder.option
        count = 1 if option else intruder.instead
        began = time.perf_counter()
        url = f"{self._url}/v1/{path}"
        await asyncio.gather(*(asyncio.to_thread(post, url, body, 120) for _ in range(count)))
        return Record(index=0, times=[began, time.perf_counter()])

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients.values():
            client.close()

    async def _send(self, endpoint: str, index: int, extra: Mapping[str, Any] = _NOTHING) -> Record:
        request = changed(self._sources[endpoint].request(index), extra)
        if extra:
            request = msgspec.structs.replace(request, out=None)  # an option may end the answer early
        record, _ = await self._clients[endpoint].send(request)
        return record


async def measure(
    url: str, names: Sequence[str], rounds: int, work: Workload, long: Workload, short: Workload
) -> dict[str, Any]:
    """The figures of every intruder of `names`, of all callers of long prompts, and of short prompts."""
    neighbours = Neighbours(url, server.first_model(Target.of(url)), work, long, short)
    gc.disable()  # a garbage collection of the client would show as a gap
    try:
        return {
            "intruders": {name: await _pairs(neighbours, name, rounds) for name in names},
            "callers": await _callers(neighbours, rounds),
            "short_prompts": await _short_prompts(neighbours, rounds),
        }
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


async def _callers(neighbours: Neighbours, rounds: int) -> dict[str, Any]:
    """The two figures of every number of callers."""
    results = {}
    plain = [(await neighbours.beside(0))[0] for _ in range(rounds)]
    for name, callers in LONG.items():
        alone = await neighbours.callers_alone(callers.number)
        beside = [await neighbours.beside(callers.number) for _ in range(rounds)]
        firsts = [first for _, each in beside for first in each]
        if not firsts:
            raise RuntimeError("no caller had a first token while all streams ran: increase --output-len")
        speed = median(found.tok_s for found, _ in beside) / median(found.tok_s for found in plain)
        times = median(firsts) / median(alone)
        results[name] = {
            "speed": round(speed, 3),
            "times": round(times, 2),
            "tok_s": round(median(found.tok_s for found, _ in beside), 1),
            "p99_ms": round(median(found.p99_ms for found, _ in beside), 1),
            "first_ms": round(1e3 * median(firsts), 1),
            "first_alone_ms": round(1e3 * median(alone), 1),
            "holds": speed >= callers.speed and times <= callers.times,
        }
        print(name, results[name], flush=True)
    return results


async def _short_prompts(neighbours: Neighbours, rounds: int) -> dict[str, Any]:
    """The figure of short prompts."""
    alone, beside = list[float](), list[float]()
    for _ in range(rounds):
        alone += await neighbours.short_firsts(0)
        beside += await neighbours.short_firsts(1)
    if not alone or not beside:
        raise RuntimeError("no short prompt was sent while all streams ran: increase --output-len")
    found = {
        "times": round(median(beside) / median(alone), 2),
        "first_ms": round(1e3 * median(beside), 1),
        "first_p95_ms": round(1e3 * float(np.percentile(beside, 95)), 1),
        "first_alone_ms": round(1e3 * median(alone), 1),
        "holds": median(beside) <= SHORT_TIMES * median(alone),
    }
    print("short_prompts", found, flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write bench/results/NAME.json."""
    parser = command(__doc__)
    parser.add_argument("--url", help="of a running server; default: start one with the remaining flags")
    add_name(parser, "neighbours")
    parser.add_argument("--intruders", default=",".join(INTRUDERS), help="separated by commas")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    add_sizes(parser, 256, 512)
    parser.add_argument("--long", type=int, default=12_000, help="prompt tokens of a caller")
    parser.add_argument(
        "--short", type=int, default=1_000, help="prompt tokens of a short prompt beside these"
    )
    args, flags = parser.parse_known_args(argv)
    names = args.intruders.split(",")
    if unknown := set(names) - INTRUDERS.keys():
        parser.error(f"--intruders: {', '.join(sorted(unknown))} unknown, choose from {', '.join(INTRUDERS)}")
    work = sized("neighbours", args, requests=args.streams, concurrency=args.streams)
    long, short = (
        msgspec.structs.replace(work, name="callers", input_len=length, output_len=1)
        for length in (args.long, args.short)
    )

    def found(url: str) -> dict[str, Any]:
        return uvloop.run(measure(url, names, args.rounds, work, long, short))

    if args.url:
        results = found(args.url)
    else:
        with tempfile.TemporaryDirectory() as folder:
            processor = ("--logit-processor", "favour=bench.neighbours:favour")
            with serving([*SERVER, *processor, *flags], Path(folder) / "server.log") as url:
                results = found(url)
    sizes = {
        name: vars(args)[name] for name in ("streams", "rounds", "output_len", "input_len", "long", "short")
    }
    write(args.name, {**sizes, "server_flags": flags, **results})


if __name__ == "__main__":
    main()
