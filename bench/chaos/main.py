"""Whatever is done to a server, nobody else notices, and nothing is left behind: `python -m bench.chaos`.

Each row attacks a running server in one way and says what it saw against its claim. After each, pages free
and cached are all there are, nothing is locked or left running, memory grew by less than 50 MB and 20 greedy
answers are byte for byte what they were. Times are judged at full scale only: below it, on whatever machine,
the verdict is about counts. `--break` puts a fault into the server that the row must notice.

Exit code 0: every row passed, or with `--break` one did and should not have; 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.server import raise_file_limit
from bench.chaos.bench import Bench, Unseeded
from bench.chaos.row import Found, Row
from bench.chaos.rows import TABLE
from bench.chaos.server import Server
from bench.results import RESULTS, conditions

ENDED = "the row ended:"
SHOWN = 8
"""Of what is wrong; all of it is in the file."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run rows, print verdicts, keep the list."""
    args = _parser().parse_args(argv)
    if args.list:
        for row in TABLE:
            print(f"{row.name:16} {row.claim}  [--break: {row.seed}]")
        return
    raise_file_limit()
    failed = [not each["pass"] for each in asyncio.run(_run(args))]
    sys.exit(int(all(failed) if args.broken else any(failed)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", type=_rows, default=TABLE, metavar="ROW[,ROW]", help="some rows")
    parser.add_argument("--scale", type=float, default=1.0, help="share of each row's full size")
    parser.add_argument("--soak", type=float, default=20.0, metavar="MINUTES", help="of the soak at scale 1")
    parser.add_argument("--model", default="", help="in place of the random one; default: the server's")
    parser.add_argument("--break", dest="broken", action="store_true", help="seed each row's fault")
    parser.add_argument("--list", action="store_true", help="name the rows")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="bench/results/reliability.json unless broken"
    )
    return parser


def _rows(names: str) -> tuple[Row, ...]:
    table = {row.name: row for row in TABLE}
    try:
        return tuple(table[name] for name in names.split(","))
    except KeyError as error:
        raise argparse.ArgumentTypeError(f"no row {error}: there are {', '.join(table)}") from None


async def _run(args: argparse.Namespace) -> list[dict[str, Any]]:
    out = args.out or (None if args.broken else RESULTS / "reliability.json")
    server, told = Server(args.model), list[dict[str, Any]]()
    bench = Bench(server, args.scale, args.soak, args.broken)
    try:
        # Rows of one setting after each other: they share a server.
        for row in sorted(args.only, key=lambda row: str(row.setting)):
            try:
                found = await bench.run(row)
            except Unseeded:
                raise
            except Exception as error:  # a row that cannot end has failed; the others go on
                found = Found(wrong=[f"{ENDED} {type(error).__name__}: {error}", server.log()[-1500:]])
                await server.stop()
            told.append(_entry(row, found, args))
            _show(told[-1])
            if out is not None:
                out.write_text(json.dumps(told, indent=1) + "\n")
    finally:
        await server.close()
    return told


def _entry(row: Row, found: Found, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "row": row.name,
        "claim": row.claim,
        "figure": found.figures,
        "pass": not found.wrong,
        "wrong": found.wrong,
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
