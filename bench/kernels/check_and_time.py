"""Check and time every kernel in one go: `python -m bench.kernels.check_and_time --out DIR`.

In order of importance, in case time runs out: checks; times; tile search of the MoE GEMMs (configs are
written to DIR as they are found); the MoE layer with these configs. All results are in DIR/kernels.json and
DIR/log.txt.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from pathlib import Path

import torch
import triton
from triton.errors import TritonError

from bench.kernels import checks, experts, times, tune
from bench.kernels.checks import Check
from bench.kernels.inputs import MoeSize
from bench.kernels.timing import Row


class Report:
    """Prints and logs lines, and writes all results as JSON. Owner: the main thread."""

    def __init__(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._out = out
        self._log = (out / "log.txt").open("w")
        self.checks: list[Check] = []
        self.rows: list[Row] = []

    def say(self, line: str) -> None:
        """Print and log a line."""
        print(line, flush=True)
        self._log.write(line + "\n")
        self._log.flush()

    def save(self) -> None:
        """Write all figures so far."""
        figures = {
            "device": torch.cuda.get_device_name(0),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "checks": [check._asdict() for check in self.checks],
            "rows": [row._asdict() | {"share": row.bound / row.us} for row in self.rows],
        }
        (self._out / "kernels.json").write_text(json.dumps(figures, indent=1))

    def add(self, name: str, future: Future[list[Check]]) -> None:
        """Add the results of a section of checks; print the failed ones."""
        failure = future.exception()
        found = [Check(name, f"died: {failure!r}", float("inf"))] if failure else future.result()
        self.checks += found
        for check in found:
            self._log.write(check.line() + "\n")
            if not check.good:
                self.say(check.line())
        self.save()

    def run(self, name: str, section: Callable[[], Iterator[Row]]) -> None:
        """Run one section of times. A failure ends the section, not the run."""
        began = time.monotonic()
        torch.manual_seed(11)
        try:
            for found in section():
                self.rows.append(found)
                self.say(found.line())
        except (RuntimeError, AssertionError, TypeError, ValueError, KeyError, TritonError) as failure:
            self.say(f"BAD  {name} aborted: {type(failure).__name__}: {str(failure)[:600]}")
            self._log.write(traceback.format_exc())
        self.say(f"-- {name}: {time.monotonic() - began:.0f} s")
        self.save()


def checked(name: str) -> list[Check]:
    """Run one section of checks, in a separate process. An exception is a failed check."""
    torch.manual_seed(11)
    found: list[Check] = []
    try:
        found.extend(checks.ALL[name]())
    except (RuntimeError, AssertionError, TypeError, ValueError, KeyError, TritonError) as failure:
        trace = "".join(traceback.format_exception(failure))[-700:]
        found.append(Check(name, f"aborted: {trace}", float("inf")))
    return found


def prepare(report: Report, names: Sequence[str], tasks: Sequence[partial[None]]) -> None:
    """Run checks and compile tasks in parallel processes; nothing is timed meanwhile."""
    with ProcessPoolExecutor(max(len(names), 1), multiprocessing.get_context("spawn")) as pool:
        found = [pool.submit(checked, name) for name in names]
        if tasks:
            tune.compile_all(tasks)
        for name, future in zip(names, found, strict=True):
            report.add(name, future)
    good = sum(check.good for check in report.checks)
    report.say(f"checks: {good} of {len(report.checks)} good")


def main(argv: list[str] | None = None) -> int:
    """Check and time all kernels. Exit code 1 when a check failed."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path("kernels-out"))
    parser.add_argument("--only", nargs="*", default=[], help="sections: names of checks.ALL and times.ALL")
    parser.add_argument("--tune", type=int, nargs="*", default=[], help="expert widths to tune")
    parser.add_argument("--tokens", type=int, nargs="*", default=tune.TOKENS)
    parser.add_argument("--quick", action="store_true", help="a third of the tile candidates")
    parser.add_argument("--seconds", type=float, default=560, help="time limit of the tile search")
    args = parser.parse_args(argv)
    began = time.monotonic()
    report = Report(args.out)
    report.say(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, triton {triton.__version__}")
    tasks = [
        partial(tune.compile_variant, *task)
        for width in args.tune
        for task in tune.variants(width, args.tokens, args.quick)
    ]
    if not args.only or {"attention", "chunks", "shared_prefix", "small"} & set(args.only):
        tasks += times.compile_tasks()
    prepare(report, [name for name in checks.ALL if not args.only or name in args.only], tasks)
    for name, section in times.ALL.items():
        if not args.only or name in args.only:
            report.run(name, section)
    for width in args.tune:
        left = args.seconds - (time.monotonic() - began)
        _, rows = tune.tune(width, args.tokens, args.out, left, args.quick)
        report.rows += rows
        report.save()
    if not args.only or "experts" in args.only:
        report.run("experts", lambda: experts.times(MoeSize(), args.tokens, args.out))
    bad = [check for check in report.checks if not check.good]
    report.say(f"checks: {len(bad)} BAD, see above" if bad else f"checks: all {len(report.checks)} good")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
