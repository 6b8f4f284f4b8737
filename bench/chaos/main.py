"""Attacks on a running server: `python -m bench.chaos`.

Each row attacks a running server in one way and checks its claim. After each, every page must be free or
cached, no page locked, no request, connection or task left, memory grown by less than 50 MB, and 20 greedy
outputs identical to those before. Limits on times apply at full scale only; below it only counts are checked.
`--break` injects a fault into the server that the row must detect.

Exit code 0: every row passed, or with `--break` at least one passed although it should fail; 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.process import raise_file_limit
from bench.chaos.bench import Bench, InjectionFailed
from bench.chaos.row import Outcome, Row
from bench.chaos.rows import TABLE
from bench.chaos.server import Server
from bench.flags import command
from bench.results import RESULTS, conditions

ENDED = "the row ended:"
SHOWN = 8
"""Printed violations of a row; all are in the file."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run rows, print and save the verdicts."""
    args = _parser().parse_args(argv)
    if args.list:
        for row in TABLE:
            print(f"{row.name:16} {row.claim}  [--break: {row.fault}]")
        return
    raise_file_limit()
    failed = [not each["pass"] for each in asyncio.run(_run(args))]
    sys.exit(int(all(failed) if args.inject_fault else any(failed)))


def _parser() -> argparse.ArgumentParser:
    parser = command(__doc__, "python -m bench.chaos")
    parser.add_argument(
        "--only", type=_rows, default=TABLE, metavar="ROW[,ROW]", help="rows to run; default: all"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="share of each row's full size")
    parser.add_argument(
        "--soak", type=float, default=20.0, metavar="MINUTES", help="duration of the soak at scale 1"
    )
    parser.add_argument(
        "--model", default="", help="instead of a random model; 'default': the server's default model"
    )
    parser.add_argument("--break", dest="inject_fault", action="store_true", help="inject each row's fault")
    parser.add_argument("--list", action="store_true", help="list the rows")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="default: bench/results/reliability.json, none with --break"
    )
    return parser


def _rows(names: str) -> tuple[Row, ...]:
    table = {row.name: row for row in TABLE}
    try:
        return tuple(table[name] for name in names.split(","))
    except KeyError as error:
        raise argparse.ArgumentTypeError(f"no row {error}: the rows are {', '.join(table)}") from None


async def _run(args: argparse.Namespace) -> list[dict[str, Any]]:
    out = args.out or (None if args.inject_fault else RESULTS / "reliability.json")
    server, entries = Server(args.model), list[dict[str, Any]]()
    bench = Bench(server, args.scale, args.soak, args.inject_fault)
    try:
        # Sorted, so that rows of one setting share a server.
        for row in sorted(args.only, key=lambda row: str(row.setting)):
            try:
                outcome = await bench.run(row)
            except InjectionFailed:
                raise
            except Exception as error:  # the row has failed; continue with the others
                outcome = Outcome(
                    violations=[f"{ENDED} {type(error).__name__}: {error}", server.log()[-1500:]]
                )
                await server.stop()
            entries.append(_entry(row, outcome, args))
            _show(entries[-1])
            if out is not None:
                out.write_text(json.dumps(entries, indent=1) + "\n")
    finally:
        await server.close()
    return entries


def _entry(row: Row, outcome: Outcome, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "row": row.name,
        "claim": row.claim,
        "figure": outcome.figures,
        "pass": not outcome.violations,
        "wrong": outcome.violations,
        "scale": args.scale,
        "conditions": conditions(),
    }


def _show(entry: dict[str, Any]) -> None:
    figures = ", ".join(f"{name} {value}" for name, value in entry["figure"].items())
    print(
        f"{'pass' if entry['pass'] else 'FAIL'}  {entry['row']:16} {entry['claim']}\n      {figures}",
        flush=True,
    )
    for each in entry["wrong"][:SHOWN]:
        print(f"      ! {each}", flush=True)
