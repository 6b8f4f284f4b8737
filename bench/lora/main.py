"""Adapters against the same server without, in turn:

    python -m bench.lora --cases 'c*,zipf*' --tmp DIR [--seconds 540] [flags of both servers]

A server without adapters and one with are started for each model (`bench.lora.cases`), both on one GPU where
both fit, and measured in turn: without, then each kind of requests at the server with adapters; in every
second round in reverse. Before the first round each kind is warmed up. `out_tok_s` and `base_out_tok_s` are
medians over rounds, of a kind and of the server without adapters, prefill included; `ratio` is the median of
their ratios by round. Of models that fit only once, all rounds are run on one server and then on the other.

    ...-8mixed   8 adapters of rank 16 on all seven targets, by requests in turn
    ...-one      all requests have the same
    ...-base     none has one, in the server with adapters
    zipf-...     64 adapters over 8 places, by requests with Zipf's popularity; in zipf-q512 and zipf-q1024
                 128 of 512 or 1,024 callers run, and the others are queued, in both servers
    churn-c32    32 running streams of 7 adapters while once a second another one is loaded, asked, unloaded;
                 its base: the same server and streams, and the short request has an adapter that stays

After each load the results are written: a list of objects, where those of this run replace older ones of the
same name. Adapters are random and made under --tmp, which wants 1 GB of disk for Qwen3-8B and 2 GB for
Qwen3-30B-A3B.

Bias: the client shares the server's cores. Equal files stand for different adapters of the 30B model, and for
some of the 64 (`bench.lora.adapters`).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import uvloop

from bench.flags import add_cases, add_sizes, chosen, command, lowest
from bench.load import server
from bench.load.client import Target
from bench.load.prompts import Source, changed
from bench.load.report import align
from bench.load.server import base_name
from bench.load.workloads import Workload
from bench.lora import churn
from bench.lora.adapters import make_adapters
from bench.lora.cases import ALL, CHURN, LOADS, SETUPS, ZIPF, Case, picks
from bench.neighbours import Figures
from bench.results import conditions, replace
from bench.servers import Clock, serving
from bench.spec import wave
from bench.spec.wave import Wave

PLAIN = "plain"
"""The kind of waves at the server without adapters."""

CHURN_TOKENS = 1024
"""Tokens of an answer while adapters come and go: some nine seconds."""

Result = dict[str, Any]
Waves = dict[tuple[str, str], list[Wave]]
"""Waves by load and kind."""


class Bench:
    """How the cases of one model are measured."""

    def __init__(self, cases: Sequence[Case], args: argparse.Namespace, clock: Clock) -> None:
        self.cases, self._args, self._clock = cases, args, clock
        self._waves: Waves = {}
        self._load_s: list[float] = []
        self._made: list[Path] = []
        self.about: Result = {}

    # -- one server or both ------------------------------------------------------------------------

    def make(self) -> None:
        """The adapters of all cases."""
        setup = SETUPS[self.cases[0].setup]
        count, began = max(case.adapters for case in self.cases), time.perf_counter()
        directory = Path(tempfile.mkdtemp(dir=self._args.tmp))
        self._made = make_adapters(Path(setup.model), directory, count, self._args.rank, setup.files)
        print(f"{count} adapters made in {time.perf_counter() - began:.1f} s", flush=True)

    def flags(self, adapters: bool) -> list[str]:
        """Flags of a server with room for the largest case."""
        loads = [LOADS[case.load]._replace(work=self.workload(case.load, case.kind)) for case in self.cases]
        rows = max(load.rows for load in loads) + 1  # churn's short requests, too
        lengths = [load.work.input_len + load.work.output_len + 64 for load in loads]
        tokens = max((load.rows + 1) * length for load, length in zip(loads, lengths, strict=True))
        flags = ["--model", SETUPS[self.cases[0].setup].model, "--load-format", "dummy"]
        flags += ["--max-running", str(rows), "--context-length", str(max(lengths))]
        flags += ["--kv-tokens", str(2 * tokens)]  # half for prefixes of answered requests
        if adapters:
            flags += ["--enable-lora", "--max-loras-per-batch", str(self._args.places)]
            flags += ["--max-lora-rank", str(self._args.rank), "--max-loaded-loras", str(len(self._made) + 1)]
            flags += ["--lora-root", str(self._made[0].parent)] if self._made else []
        return flags

    def load(self, url: str) -> None:
        """Have the server load all adapters."""
        self._load_s = [churn.load(url, path.name, path) for path in self._made]
        if self._load_s:
            print(f"{len(self._load_s)} adapters loaded in {sum(self._load_s):.1f} s", flush=True)

    def measure(self, urls: Mapping[str, str]) -> None:
        """All rounds of each load, at those of the servers PLAIN and `lora` that run; where both have been
        measured, results are saved."""
        for load in dict.fromkeys(case.load for case in self.cases):
            mine = [case for case in self.cases if case.load == load and case.kind != CHURN]
            kinds = [case.kind for case in mine if "lora" in urls]
            if mine and PLAIN in urls:
                kinds.insert(0, PLAIN)
            left = self._clock.case()
            try:
                for kind in kinds:
                    self._wave(urls, load, kind, -1, left)
                for turn in range(self._args.rounds):
                    for kind in kinds if turn % 2 == 0 else kinds[::-1]:
                        found = self._wave(urls, load, kind, turn, left)
                        self._waves.setdefault((load, kind), []).append(found)
            except TimeoutError:
                print(f"{load}: out of time", flush=True)
            for case in mine if "lora" in urls else ():
                pairs = self._waves.get((load, PLAIN), []), self._waves.get((load, case.kind), [])
                if all(pairs):
                    self._save(case, speeds(*pairs))
        for case in self.cases:
            if case.kind == CHURN and "lora" in urls:
                self._churn(case, urls["lora"])

    # -- one wave ----------------------------------------------------------------------------------

    def workload(self, load: str, kind: str) -> Workload:
        """Requests of a wave. Each kind has prompts of its own."""
        args, work = self._args, LOADS[load].work
        clients = args.clients or work.concurrency
        long = CHURN_TOKENS if kind == CHURN else work.output_len
        return msgspec.structs.replace(
            work,
            name=f"{load}-{kind}",
            input_len=args.input_len or work.input_len,
            output_len=args.output_len or long,
            concurrency=clients,
            requests=work.requests * clients // work.concurrency,
            vocab_low=lowest(args.vocab_high),
            vocab_high=args.vocab_high,
        )

    def _wave(
        self, urls: Mapping[str, str], load: str, kind: str, turn: int, left: Callable[[], float]
    ) -> Wave:
        """Wave number `turn` of a kind; -1 is a short one."""
        url = urls[PLAIN if kind == PLAIN else "lora"]
        work = self.workload(load, kind)
        if turn < 0:
            work = msgspec.structs.replace(work, requests=work.concurrency, output_len=16, name="warm")
        target = Target.of(url)
        server.flush(target)
        source, count = Source(work, server.first_model(target)), work.requests
        case = next((case for case in self.cases if case.load == load and case.kind == kind), None)
        fields: list[dict[str, Any]] = [{} for _ in range(count)]
        if case is not None and case.adapters:
            fields = [{"model": self._made[at].name} for at in picks(case, max(turn, 0) * count, count)]
        requests = [changed(source.request(max(turn, 0) * count + i), each) for i, each in enumerate(fields)]
        return wave.figures(uvloop.run(wave.send(target, work, requests, left())))

    def _churn(self, case: Case, url: str) -> None:
        work, left = self.workload(case.load, CHURN), self._clock.case()
        names = [path.name for path in self._made[: case.adapters]]
        pairs: list[tuple[Figures, Figures]] = []

        async def rounds() -> None:
            streams = churn.Churn(url, work, names, self._made[0])
            try:
                await streams.run(-1, True)
                for turn in range(self._args.rounds):
                    order = (False, True) if turn % 2 == 0 else (True, False)
                    found = {passing: await streams.run(2 * turn + passing, passing) for passing in order}
                    pairs.append((found[False], found[True]))
                    if left() <= 0:
                        return
            finally:
                streams.close()

        uvloop.run(rounds())
        self._save(case, gaps(pairs))

    def _save(self, case: Case, found: Result) -> None:
        work = self.workload(case.load, case.kind)
        about = {
            "adapters": case.adapters,
            "rank": self._args.rank,
            "places": self._args.places,
            **({"zipf": ZIPF} if case.kind == "zipf" else {}),
            "concurrency": work.concurrency,
            "requests": work.requests if case.kind != CHURN else work.concurrency,
            "input_len": work.input_len,
            "output_len": work.output_len,
            "adapter_load_s": round(median(self._load_s), 3) if self._load_s else None,
        }
        result = {"name": case.name, **found, **about, "conditions": {**self.about, **conditions()}}
        replace(self._args.out, result)
        print(table([result]), flush=True)


def speeds(plain: Sequence[Wave], other: Sequence[Wave]) -> Result:
    """Figures of a kind of requests beside those of the server without adapters, round by round."""
    ratios = [mine.tok_s / base.tok_s for base, mine in zip(plain, other, strict=False)]
    found: Result = {}
    for prefix, waves in (("", other), ("base_", plain)):
        found[f"{prefix}out_tok_s"] = round(median(each.tok_s for each in waves), 1)
        found[f"{prefix}itl_p99_ms"] = round(median(each.itl_p99_ms for each in waves), 2)
        found[f"{prefix}tpot_ms"] = round(median(each.tpot_ms for each in waves), 3)
    return found | {"ratio": round(median(ratios), 4), "ratios": [round(each, 4) for each in ratios]}


def gaps(pairs: Sequence[tuple[Figures, Figures]]) -> Result:
    """Figures of streams while adapters come and go beside those of the same streams without."""
    found: Result = {}
    for prefix, runs in zip(("base_", ""), zip(*pairs, strict=True), strict=True):
        found[f"{prefix}out_tok_s"] = round(median(run.tok_s for run in runs), 1)
        found[f"{prefix}itl_p99_ms"] = round(median(run.p99_ms for run in runs), 2)
    more = median(own.p99_ms - plain.p99_ms for plain, own in pairs)
    ratios = [own.tok_s / plain.tok_s for plain, own in pairs]
    return found | {
        "ratio": round(median(ratios), 4),
        "ratios": [round(each, 4) for each in ratios],
        "p99_more_ms": round(more, 2),
    }


def table(results: Sequence[Result]) -> str:
    """One line per case."""
    rows: list[tuple[str, ...]] = [("case", "ratio", "tok/s", "base tok/s", "p99 ms", "base p99 ms")]
    for each in results:
        names = ("out_tok_s", "base_out_tok_s", "itl_p99_ms", "base_itl_p99_ms")
        rows.append((each["name"], f"{each['ratio']:.3f}", *(f"{each[name]:,.2f}" for name in names)))
    return align(rows)


def run(cases: Sequence[Case], args: argparse.Namespace, flags: Sequence[str], folder: Path) -> bool:
    """Measure all cases, model by model; a server that fails ends its model alone. Returns whether all
    models were measured."""
    clock, good = Clock(args.seconds, args.case_seconds), True
    for setup in dict.fromkeys(case.setup for case in cases):
        bench = Bench([case for case in cases if case.setup == setup], args, clock)
        bench.make()
        sides = (PLAIN, "lora") if any(case.kind != CHURN for case in bench.cases) else ("lora",)
        own = {side: [*bench.flags(side == "lora"), *flags] for side in sides}
        bench.about = {"server_flags": [base_name(flag) for flag in own["lora"]]}
        try:
            with ExitStack() as both:
                urls: dict[str, str] = {}
                for side in own:
                    if urls and not SETUPS[setup].together:
                        bench.measure(urls)
                        urls.clear()
                        both.close()
                    urls[side] = both.enter_context(
                        serving(own[side], folder / f"{setup}-{side}.log", max(clock.left(), 1))
                    )
                bench.load(urls["lora"])
                bench.measure(urls)
        except (RuntimeError, OSError) as error:
            print(f"{setup}: {error}", flush=True)
            good = False
    return good


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parse = command(__doc__, "python -m bench.lora")
    add_cases(parse, "c*,zipf*,churn*", "h200-lora.json", seconds=(540, 240))
    add_sizes(parse, 0, 0)
    parse.add_argument("--tmp", type=Path, help="directory for adapters; none: the system's")
    parse.add_argument("--rounds", type=int, default=3, help="waves of each kind")
    parse.add_argument("--rank", type=int, default=16)
    parse.add_argument("--places", type=int, default=8, help="--max-loras-per-batch")
    parse.add_argument("--clients", type=int, default=0, help="0, as of the lengths: as the load says")
    return parse


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write. Exits with 1 if a model was not measured."""
    parse = parser()
    args, flags = parse.parse_known_args(argv)
    if args.list:
        print("\n".join(case.name for case in ALL))
        return
    try:
        cases = chosen(ALL, args.cases)
    except ValueError as error:
        parse.error(str(error))
    if args.tmp is not None:
        args.tmp.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.tmp) as folder:
        args.tmp = Path(folder)
        if not run(cases, args, flags, Path(folder)):
            raise SystemExit(1)
