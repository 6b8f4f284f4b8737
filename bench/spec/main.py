"""Speculation against the same server without, in turn:

    python -m bench.spec --cases '8b-accept3-*,8b-accept1-*' [--seconds 500] [flags of both servers]

A server with and one without speculation are started for each setup (`bench.spec.cases`), by default both on
one GPU, and measured in turn: without, with, with, without. A wave of requests, one of each client (of data
four, and at least 16), is one measurement; a short one before the first warms each server up. `speedup` is
the median over pairs of waves of the ratio of their output tokens per second, prefill included. Setups that
fit only once, and all with --apart, run all cases on one server and then on the other. After each case the
results are written: a list of objects with `name`, `speedup` and `accept_len`, where those of this run
replace older ones of the same name.

Acceptance of random weights is simulated (`bench.spec.simulate`). The setups `ngram` and `head` take a real
model (--model, and --head for the second) and prompts (--data). --url-base and --url-spec name servers that
run already, the second as `python -m bench.spec.server` for simulated cases. So are two commits compared
that both serve without speculation, each from its own checkout:

    python -m bench.spec --cases '8b-accept1-*' --url-base OLD --url-spec NEW --out FILE

Bias: the client shares the server's cores; one more kernel of about two microseconds a step simulates;
exactly A - 1 drafts are accepted in each step, where a real head's number varies. `ngram` looks up a
request's own text alone, unless --spec-flags says otherwise: prompts are asked again and again.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.flags import add_cases, add_sizes, chosen, command
from bench.load.report import align
from bench.load.server import base_name
from bench.results import conditions, replace
from bench.servers import Clock, serving
from bench.spec import wave
from bench.spec.cases import HEAD, NGRAM, SETUPS, Case, by_setup, every
from bench.spec.wave import Sizes, Wave

SIDES = ("base", "spec")
WARM_TOKENS = 16

Result = dict[str, Any]
Pair = tuple[Wave, Wave]


class Bench(NamedTuple):
    """How every case is measured, and where the results go."""

    sizes: Sizes
    data: Path | None
    rounds: int
    clock: Clock
    out: Path
    about: Mapping[str, Any]

    def warm(self, url: str, case: Case, left: Callable[[], float]) -> None:
        """A short wave."""
        work = wave.workload(case, self.sizes._replace(output_len=WARM_TOKENS), self.data)
        wave.run(url, case, work, self.rounds, left())

    def wave(self, url: str, case: Case, turn: int, left: Callable[[], float]) -> Wave:
        """Wave number `turn`."""
        return wave.run(url, case, wave.workload(case, self.sizes, self.data), turn, left())

    def together(self, urls: Mapping[str, str], cases: Sequence[Case]) -> list[Result]:
        """Run cases on both servers, in turn. A case that runs out of time keeps the pairs that it has."""
        done = []
        for case in cases:
            pairs: list[Pair] = []
            left = self.clock.case()
            try:
                for side in SIDES:
                    self.warm(urls[side], case, left)
                for turn in range(self.rounds):
                    order = SIDES if turn % 2 == 0 else SIDES[::-1]
                    found = {side: self.wave(urls[side], case, turn, left) for side in order}
                    pairs.append((found["base"], found["spec"]))
            except TimeoutError:
                print(f"{case.name}: out of time after {len(pairs)} pairs", flush=True)
            if pairs:
                done.append(self.save(case, pairs))
        return done

    def apart(
        self, server: Callable[[str], AbstractContextManager[str]], cases: Sequence[Case]
    ) -> list[Result]:
        """Run all cases on one server, then on the other: one server runs at a time."""
        waves, done = dict[tuple[str, Case], list[Wave]](), list[Result]()
        for side in SIDES:
            clock = self.clock.share(0.5 if side == "base" else 1.0)
            with server(side) as url:
                for case in cases:
                    mine = waves.setdefault((side, case), [])
                    left = clock.case()
                    try:
                        self.warm(url, case, left)
                        for turn in range(self.rounds):
                            mine.append(self.wave(url, case, turn, left))
                    except TimeoutError:
                        print(f"{case.name}: {side} out of time after {len(mine)} waves", flush=True)
                    if side == "spec" and (pairs := list(zip(waves["base", case], mine, strict=False))):
                        done.append(self.save(case, pairs))
        return done

    def save(self, case: Case, pairs: Sequence[Pair]) -> Result:
        """Write the results with those of `case` in place of older ones."""
        found = result(case, pairs, self.about)
        replace(self.out, found)
        print(line(found), flush=True)
        return found


def result(case: Case, pairs: Sequence[Pair], about: Mapping[str, Any]) -> Result:
    """Medians over pairs of waves without and with speculation."""
    base, spec = zip(*pairs, strict=True)
    rows = sum(each.drafts.rows for each in spec)
    drafted, accepted = (sum(getattr(each.drafts, name) for each in spec) for name in ("drafted", "accepted"))
    found: Result = {
        "name": f"{case.name}-{about['input_len']}/{about['output_len']}",
        "speedup": round(median(b.tok_s / a.tok_s for a, b in pairs), 4),
        "accept_len": round(1 + accepted / rows, 3) if rows else 1.0,
        "speedups": [round(b.tok_s / a.tok_s, 4) for a, b in pairs],
        "max_drafts": spec[0].drafts.most,
        "drafted_rows": rows,
        "drafted_tokens": drafted,
        "accepted_tokens": accepted,
        "clients": case.clients,
        "temperature": case.temperature,
    }
    for side, waves in zip(SIDES, (base, spec), strict=True):
        found[side] = {
            name: round(median(getattr(each, name) for each in waves), 3)
            for name in ("tok_s", "itl_p99_ms", "tpot_ms")
        }
    # Of one row, so with its share of prefill; a row without drafts makes one token in a step.
    found["step_ms"] = {
        "base": found["base"]["tpot_ms"],
        "spec": round(found["spec"]["tpot_ms"] * found["accept_len"], 3),
    }
    return found | {"conditions": {**about, **conditions()}}


def line(found: Result) -> str:
    """The figures of a case, in short."""
    base, spec = found["base"], found["spec"]
    return (
        f"{found['name']}: {found['speedup']:.3f}x, accepted length {found['accept_len']:.2f}, "
        f"{base['tok_s']:,.0f} -> {spec['tok_s']:,.0f} tok/s"
    )


def table(results: Sequence[Result]) -> str:
    """One line per case."""
    head = (
        "case",
        "speedup",
        "accept",
        "base tok/s",
        "spec tok/s",
        "base p99",
        "spec p99",
        "step",
        "spec step",
    )
    rows = [head]
    for each in results:
        base, spec, step = each["base"], each["spec"], each["step_ms"]
        figures = (
            base["tok_s"], spec["tok_s"], base["itl_p99_ms"], spec["itl_p99_ms"], step["base"], step["spec"]
        )  # fmt: skip
        rows.append(
            (
                each["name"],
                f"{each['speedup']:.3f}",
                f"{each['accept_len']:.2f}",
                *(f"{figure:,.2f}" for figure in figures),
            )
        )
    return align(rows)


def server_flags(setup: str, side: str, cases: Sequence[Case], args: argparse.Namespace) -> list[str]:
    """Flags of the server of one side, with room for the largest case. ValueError where one is missing."""
    named = SETUPS.get(setup)
    model, head = (named.model, named.head) if named else (args.model, args.head)
    if not model or (setup == HEAD and not head):
        raise ValueError(f"the setup {setup} needs --model" + " and --head" * (setup == HEAD))
    clients = max(case.clients for case in cases)
    room = 64 + max(args.input_len, 2048 if any(case.data for case in cases) else 0) + args.output_len
    flags = ["--model", model, "--max-running", str(clients), "--context-length", str(room)]
    flags += ["--kv-tokens", str((clients + 1) * room)]
    if named:
        flags += ["--load-format", "dummy"]
    if side == "spec":
        # Waves ask the same again: with former answers kept, one would be copied from another.
        ngram = ["--speculative-algorithm", NGRAM, "--speculative-ngram-capacity", "0"]
        flags += ngram if setup == NGRAM else ["--speculative-draft-model-path", head]
        flags += args.spec_flags.split()
    return flags


def run(cases: Sequence[Case], args: argparse.Namespace, flags: Sequence[str], folder: Path) -> list[Result]:
    """Measure all cases, setup by setup. ValueError for a missing flag; a server that fails ends its setup
    alone."""
    sizes = Sizes(args.input_len, args.output_len, args.vocab_high)
    clock, results = Clock(args.seconds, args.case_seconds), list[Result]()
    for setup, mine in by_setup(cases).items():
        if clock.left() <= 0:
            print(f"{setup}: no time is left", flush=True)
            continue
        own = {side: [*server_flags(setup, side, mine, args), *flags] for side in SIDES if not args.url_base}
        about = {
            "input_len": sizes.input_len,
            "output_len": sizes.output_len,
            "server_flags": [base_name(flag) for flag in own.get("spec", ())],
        }
        bench = Bench(sizes, args.data, args.rounds, clock, args.out, about)
        server = partial(side_of, setup, own, folder, clock)
        try:
            if args.url_base:
                results += bench.together({"base": args.url_base, "spec": args.url_spec}, mine)
            elif args.apart or (setup in SETUPS and not SETUPS[setup].together):
                results += bench.apart(server, mine)
            else:
                with ExitStack() as both:
                    urls = {side: both.enter_context(server(side)) for side in SIDES}
                    results += bench.together(urls, mine)
        except (RuntimeError, OSError) as error:
            print(f"{setup}: {error}", flush=True)
    return results


def side_of(
    setup: str, flags: Mapping[str, Sequence[str]], folder: Path, clock: Clock, side: str
) -> AbstractContextManager[str]:
    """The server of one side."""
    module = "bench.spec.server" if side == "spec" and setup in SETUPS else "app"
    return serving(flags[side], folder / f"{setup}-{side}.log", max(clock.left(), 1), module)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parse = command(__doc__, "python -m bench.spec")
    add_cases(parse, "8b-accept*", "h200-spec.json", seconds=(500, 120))
    add_sizes(parse, 128, 1024)
    parse.add_argument("--rounds", type=int, default=2, help="pairs of waves of a case")
    parse.add_argument("--apart", action="store_true", help="never two servers at once")
    parse.add_argument("--url-base", help="of a running server without speculation")
    parse.add_argument("--url-spec", help="of the same with it")
    parse.add_argument("--model", default="", help="of the setups ngram and head")
    parse.add_argument("--head", default="", help="of the setup head")
    parse.add_argument("--data", type=Path, help="directory with the files of Spec-Bench and MT-bench")
    parse.add_argument("--spec-flags", default="", help="more flags of the server with speculation")
    return parse


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, write, print a table. Exits with 1 if no case was measured."""
    parse = parser()
    args, flags = parse.parse_known_args(argv)
    if args.list:
        print("\n".join(case.name for case in every()))
        return
    if bool(args.url_base) != bool(args.url_spec):
        parse.error("--url-base and --url-spec go together")
    try:
        cases = chosen(every(), args.cases)
        with tempfile.TemporaryDirectory() as folder:
            results = run(cases, args, flags, Path(folder))
    except ValueError as error:
        parse.error(str(error))
    print(table(results))
    if not results:
        raise SystemExit(1)
