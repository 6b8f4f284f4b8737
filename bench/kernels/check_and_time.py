"""Check and time every kernel in one go: `python -m bench.kernels.check_and_time --out DIR`.

In this order, so that what matters is there if time runs out: checks; times; tile search of the expert
GEMMs (its configs are written to DIR as it goes); the expert MLP by what was found. The table comes
last and fits a terminal; everything is in DIR/kernels.json and DIR/log.txt.
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
    """Lines as they come, and everything again as JSON. Owner: the main thread."""

    def __init__(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._out = out
        self._log = (out / "log.txt").open("w")
        self.checks: list[Check] = []
        self.rows: list[Row] = []

    def say(self, line: str) -> None:
        """Print and keep."""
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
        """A section of checks: the bad ones are said."""
        failure = future.exception()
        found = [Check(name, f"died: {failure!r}", float("inf"))] if failure else future.result()
        self.checks += found
        for check in found:
            self._log.write(check.line() + "\n")
            if not check.good:
                self.say(check.line())
        self.save()

    def run(self, name: str, section: Callable[[], Iterator[Row]]) -> None:
        """One section of times. A failure ends the section, not the run: the machine is rented."""
        began = time.monotonic()
        torch.manual_seed(11)
        try:
            for found in section():
                self.rows.append(found)
                self.say(found.line())
        except (RuntimeError, AssertionError, TypeError, ValueError, KeyError, TritonError) as failure:
            self.say(f"BAD  {name} broke off: {type(failure).__name__}: {str(failure)[:600]}")
            self._log.write(traceback.format_exc())
        self.say(f"-- {name}: {time.monotonic() - began:.0f} s")
        self.save()


def checked(name: str) -> list[Check]:
    """One section of checks, in a process of its own. What breaks off is a check that failed."""
    torch.manual_seed(11)
    found: list[Check] = []
    try:
        found.extend(checks.ALL[name]())
    except (RuntimeError, AssertionError, TypeError, ValueError, KeyError, TritonError) as failure:
        said = "".join(traceback.format_exception(failure))[-700:]
        found.append(Check(name, f"broke off: {said}", float("inf")))
    return found


def prepare(report: Report, names: Sequence[str], tasks: Sequence[partial[None]]) -> None:
    """Checks and compiling side by side, each section and each task in a process: neither needs the
    GPU to itself, and nothing is timed meanwhile."""
    with ProcessPoolExecutor(max(len(names), 1), multiprocessing.get_context("spawn")) as pool:
        found = [pool.submit(checked, name) for name in names]
        if tasks:
            tune.compile_all(tasks)
        for name, future in zip(names, found, strict=True):
            report.add(name, future)
    good = sum(check.good for check in report.checks)
    report.say(f"checks: {good} of {len(report.checks)} good")


def main(argv: list[str] | None = None) -> int:
    """Exit code 1 when a check failed."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path("kernels-out"))
    parser.add_argument("--only", nargs="*", default=[], help="sections: names of checks.ALL and times.ALL")
    parser.add_argument("--tune", type=int, nargs="*", default=[], help="expert widths to search")
    parser.add_argument("--tokens", type=int, nargs="*", default=tune.TOKENS)
    parser.add_argument("--quick", action="store_true", help="a third of the tile candidates")
    parser.add_argument("--seconds", type=float, default=560, help="stop searching after so long")
    asked = parser.parse_args(argv)
    began = time.monotonic()
    report = Report(asked.out)
    report.say(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, triton {triton.__version__}")
    tasks = [
        partial(tune.compile_variant, *task)
        for width in asked.tune
        for task in tune.variants(width, asked.tokens, asked.quick)
    ]
    if not asked.only or {"attention", "chunks", "shared_prefix", "small"} & set(asked.only):
        tasks += times.compile_tasks()
    prepare(report, [name for name in checks.ALL if not asked.only or name in asked.only], tasks)
    for name, section in times.ALL.items():
        if not asked.only or name in asked.only:
            report.run(name, section)
    for width in asked.tune:
        left = asked.seconds - (time.monotonic() - began)
        _, rows = tune.tune(width, asked.tokens, asked.out, left, asked.quick)
        report.rows += rows
        report.save()
    if not asked.only or "experts" in asked.only:
        report.run("experts", lambda: experts.times(MoeSize(), asked.tokens, asked.out))
    bad = [check for check in report.checks if not check.good]
    report.say(f"checks: {len(bad)} BAD, see above" if bad else f"checks: all {len(report.checks)} good")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
