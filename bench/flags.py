"""Flags that several benches have."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol, TypeVar

from bench.load.workloads import Workload
from bench.results import RESULTS


class Named(Protocol):
    """A case that `--cases` may name."""

    @property
    def name(self) -> str:
        """The name of the case in results and `--cases`."""


AnyCase = TypeVar("AnyCase", bound=Named)


def command(doc: str | None, prog: str | None = None) -> argparse.ArgumentParser:
    """A parser whose `--help` shows the module's docstring `doc` as it is written."""
    return argparse.ArgumentParser(
        prog, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_name(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the flag for the name of the results."""
    parser.add_argument("--name", default=default, help="of the file under bench/results")


def add_sizes(parser: argparse.ArgumentParser, input_len: int, output_len: int) -> None:
    """Add the flags for random prompts and their answers, in tokens."""
    parser.add_argument("--input-len", type=int, default=input_len)
    parser.add_argument("--output-len", type=int, default=output_len)
    parser.add_argument("--vocab-high", type=int, default=90_000, help="highest token id of random prompts")


def sized(name: str, args: argparse.Namespace, **more: Any) -> Workload:  # the workload's own fields
    """A workload of the flags of `add_sizes`, with `more` fields."""
    sizes = {"input_len": args.input_len, "output_len": args.output_len, "vocab_high": args.vocab_high}
    return Workload(name=name, vocab_low=lowest(args.vocab_high), **sizes | more)


def lowest(highest: int) -> int:
    """The lowest token id of random prompts: above most special tokens where the vocabulary is large."""
    return min(1_000, highest // 2)


def add_cases(parser: argparse.ArgumentParser, cases: str, out: str, seconds: tuple[float, float]) -> None:
    """Add the flags for cases to measure, the file of results, and the time for all and for one case."""
    parser.add_argument("--cases", default=cases, help="names or patterns, separated by commas")
    parser.add_argument("--list", action="store_true", help="print the names of all cases")
    parser.add_argument("--out", type=Path, default=RESULTS / out, help="results are added to it")
    parser.add_argument(
        "--seconds", type=float, default=seconds[0], help="for all, starts of servers included"
    )
    parser.add_argument("--case-seconds", type=float, default=seconds[1], help="for one case")


def chosen(cases: Iterable[AnyCase], patterns: str) -> list[AnyCase]:
    """Cases whose names match one of the patterns, which are separated by commas, in their own order.
    ValueError for a pattern without a case."""
    cases, found = list(cases), set[str]()
    for pattern in patterns.split(","):
        matching = {case.name for case in cases if fnmatchcase(case.name, pattern)}
        if not matching:
            raise ValueError(f"no case is named {pattern}")
        found |= matching
    return [case for case in cases if case.name in found]
