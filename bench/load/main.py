"""The command: `python -m bench.load --url http://127.0.0.1:8000 --scenario c32,c256`."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
from pathlib import Path
from typing import Any

import msgspec

from bench.load import plot, report, server
from bench.load.client import Target
from bench.load.pool import Job, Pool
from bench.load.records import Record
from bench.load.worker import raise_file_limit
from bench.load.workloads import Workload, named, scaled

_FIELDS: tuple[tuple[str, type, str], ...] = (
    ("input_len", int, "prompt tokens (words, for text), shared prefix included"),
    ("output_len", int, "output tokens per request"),
    ("concurrency", int, "callers of the closed loop"),
    ("requests", int, "requests, or conversations; with a trace: at most"),
    ("prefix_len", int, "prompt tokens that all requests of a group share"),
    ("prefix_groups", int, "groups with a shared prefix each"),
    ("turns", int, "turns per conversation; the history grows by the real answers"),
    ("rate", float, "open loop: arrivals per second"),
    ("burstiness", float, "1 is Poisson, less comes in bursts, more is more even"),
    ("trace", str, "replay a Mooncake .jsonl[.xz] or Azure .csv trace"),
    ("trace_speed", float, "2 replays twice as fast; 0: closed loop with the trace's lengths"),
    ("max_input_len", int, "cut a trace's prompts"),
    ("max_output_len", int, "cut a trace's outputs"),
    ("dataset", str, "prompts from JSON lines with a text, prompt, question or turns field"),
    ("vocab_low", int, "lowest token id drawn"),
    ("vocab_high", int, "highest token id drawn: below the model's vocabulary"),
    ("seed", int, "same seed, same prompts and arrivals"),
    ("temperature", float, "sampling temperature"),
    ("top_p", float, "nucleus sampling"),
    ("json_schema", str, "JSON schema for every answer (response_format)"),
)
"""Flags that are fields of `Workload`; with a scenario they override its fields."""


Runs = list[tuple[str, list[Record]]]
"""Scenario name and records: what a plot is drawn from."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parse = argparse.ArgumentParser("python -m bench.load", description=__doc__)
    parse.add_argument("--url", default="http://127.0.0.1:8000", help="server, with or without /v1")
    parse.add_argument("--api-key", default="", help="sent as a bearer token")
    parse.add_argument("--model", default="", help="default: the first one of /v1/models")
    what = parse.add_mutually_exclusive_group()
    what.add_argument(
        "--scenario", default="", help="comma-separated: `table` for the six, chat256, plain64, json64"
    )
    what.add_argument("--workload", default="custom", help="name of a workload defined by the flags below")
    for name, kind, words in _FIELDS:
        parse.add_argument("--" + name.replace("_", "-"), type=kind, help=words)
    parse.add_argument("--prompt-kind", choices=("ids", "text"), help="default: ids if possible")
    parse.add_argument("--endpoint", choices=("completions", "chat"))
    parse.add_argument("--no-ignore-eos", action="store_true", help="let answers end at EOS")
    parse.add_argument("--scale", type=float, default=1.0, help="multiplies requests and concurrency")
    parse.add_argument("--processes", type=int, default=6, help="client processes")
    parse.add_argument("--warmup", type=int, default=1, help="warm-up requests, not measured")
    parse.add_argument("--flush", action="store_true", help="POST /flush_cache before each scenario")
    parse.add_argument("--goodput", default="", help="limits in ms, for example ttft:500,tpot:50")
    parse.add_argument("--timeout", type=float, default=600.0, help="seconds per request")
    parse.add_argument("--output", type=Path, help="write results as JSON")
    parse.add_argument("--plot", type=Path, help="write a PNG (needs matplotlib: the extra `bench`)")
    parse.add_argument("--label", default="", help="name of this run in tables and plots")
    return parse


def workloads(args: argparse.Namespace) -> list[Workload]:
    """Workloads of the flags. ValueError when they contradict each other."""
    fields: dict[str, Any] = {name: getattr(args, name) for name, _, _ in _FIELDS}
    fields |= {"endpoint": args.endpoint, "prompt_kind": args.prompt_kind}
    fields = {name: value for name, value in fields.items() if value is not None}
    if args.no_ignore_eos:
        fields["ignore_eos"] = False
    text = fields.get("endpoint") == "chat" or fields.get("turns", 1) > 1 or "dataset" in fields
    if text:
        fields.setdefault("prompt_kind", "text")
    if "dataset" in fields:
        fields.setdefault("input_len", 0)
    if "trace" in fields:
        fields.setdefault("requests", 0)
    if args.scenario:
        seed = fields.pop("seed", 0)
        chosen = [
            msgspec.structs.replace(one, seed=seed + one.seed, **fields) for one in named(args.scenario)
        ]
    else:
        chosen = [Workload(name=args.workload, **fields)]
    return [scaled(one, args.scale) for one in chosen]


def main(argv: list[str] | None = None) -> int:
    """Run. Exit status: 0; 1 every request failed; 2 wrong command or no server; 130 interrupted."""
    parse = parser()
    args = parse.parse_args(argv)
    raise_file_limit()
    try:
        works, goals = workloads(args), report.parse_goals(args.goodput)
        target = Target.of(args.url, args.api_key, args.timeout)
        model = args.model or server.first_model(target)
        jobs = [Job(target, work, model, args.processes, args.warmup) for work in works]
        conditions = describe(args, target, model)
        _check_writable(args.output, args.plot)
        results, runs = _run_all(jobs, goals, conditions, args)
    except (OSError, ValueError) as error:
        print(f"bench.load: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130  # a second Ctrl-C, or one before the first request: no results
    if len(results) > 1:
        print(report.table(results))
    if args.plot and not plot.draw(args.plot, runs, args.label or str(target.port)):
        print("no plot: matplotlib is not installed (pip install '.[bench]')", file=sys.stderr)
    if results[-1]["interrupted"]:
        return 130
    return 0 if any(result["ok"] for result in results) else 1


def _check_writable(*paths: Path | None) -> None:
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"{path.parent} is not a directory")  # checked before the run, not after


def _run_all(
    jobs: list[Job], goals: dict[str, float], conditions: report.Result, args: argparse.Namespace
) -> tuple[list[report.Result], Runs]:
    results: list[report.Result] = []
    runs: Runs = []
    for job in jobs:
        if args.flush and not server.flush(job.target):
            print("the server cannot flush its cache: check the cached share", file=sys.stderr)
        outcome = Pool(job).run()
        conditions = conditions | {"client_processes": outcome.processes, "warmup": job.warmup}
        results.append(report.summary(job.work, outcome, goals, conditions))
        runs.append((job.work.name, outcome.records))
        print(report.block(results[-1]) + "\n", flush=True)
        if args.output:  # after each scenario, so that a failure of the next loses no results
            args.output.write_text(json.dumps(results, indent=1) + "\n")
        if outcome.interrupted:
            break
    return results, runs


def describe(args: argparse.Namespace, target: Target, model: str) -> report.Result:
    """Conditions of the measurement, without the server's host and paths."""
    return {
        "label": args.label,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "url": f"{'https' if target.tls else 'http'}://*:{target.port}",
        "model": server.base_name(model),
        "server_info": server.info(target),
        "seed": args.seed or 0,
        "scale": args.scale,
        "python": platform.python_version(),
        "client": f"{platform.system()} {platform.machine()}",
    }
