"""Compares result files: `python -m bench.compare before.json after.json --peer vllm=vllm.json`."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from bench.load.report import align

Result = dict[str, Any]
Results = dict[str, Result]

# Higher is better for the first kind only.
_RATES = ("out_tok_s", "tot_tok_s")
_TIMES = ("ttft_ms", "tpot_ms", "itl_ms")


def load(path: Path) -> Results:
    """Results of a file by scenario; the last one of each name."""
    rows = json.loads(path.read_text())
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "name" in row for row in rows):
        raise ValueError(f"{path} is not a list of results")
    return {row["name"]: row for row in rows}


def headline(result: Result) -> float | None:
    """The throughput by which servers are compared: total tokens/s for prefill, else output tokens/s."""
    value = result.get(result.get("headline", "out_tok_s"))
    return float(value) if value else None


def ratio(new: float | None, old: float | None) -> float | None:
    """new / old, or None when either is missing or zero."""
    return new / old if new and old else None


def geomean(values: list[float]) -> float | None:
    """Geometric mean of positive values; None without any."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def compare(old: Results, new: Results) -> str:
    """A table of all figures of both files and their ratios, in the order of `new`."""
    rows = [("scenario", "figure", "old", "new", "new/old")]
    for name, result in new.items():
        before = old.get(name)
        if before is None:
            continue
        for figure in (*_RATES, *_TIMES, "bad", "cached_share"):
            a, b = before.get(figure), result.get(figure)
            rows.append((name, figure, _show(a), _show(b), _show(ratio(b, a), 3)))
    gains = [r for name in new if (r := ratio(headline(new[name]), headline(old.get(name, {}))))]
    rows.append(("geometric mean", f"of {len(gains)}", "", "", _show(geomean(gains), 3)))
    return align(rows)


def against(peers: dict[str, Results], new: Results) -> str:
    """A table of each scenario's headline, those of the peers, and the ratio to the best peer."""
    rows = [("scenario", "figure", *peers, "new", "new/best peer")]
    gains: list[float] = []
    for name, result in new.items():
        figure = result.get("headline", "out_tok_s")
        theirs = [headline({**peer.get(name, {}), "headline": figure}) for peer in peers.values()]
        gain = ratio(headline(result), max((x for x in theirs if x), default=None))
        gains += [gain] if gain else []
        rows.append((name, figure, *map(_show, theirs), _show(headline(result)), _show(gain, 3)))
    rows.append(("geometric mean", f"of {len(gains)}", *("" for _ in peers), "", _show(geomean(gains), 3)))
    return align(rows)


def _show(value: float | None, digits: int = 2) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:,.{digits}f}"


def main(argv: list[str] | None = None) -> int:
    """Print the tables. Exit status 2 when a file cannot be read."""
    parse = argparse.ArgumentParser("python -m bench.compare", description=__doc__)
    parse.add_argument("old", type=Path)
    parse.add_argument("new", type=Path)
    parse.add_argument(
        "--peer", action="append", default=[], metavar="NAME=FILE", help="another server's results"
    )
    args = parse.parse_args(argv)
    try:
        old, new = load(args.old), load(args.new)
        pairs = [(name, path) for name, _, path in (peer.rpartition("=") for peer in args.peer)]
        peers = {name or Path(path).stem: load(Path(path)) for name, path in pairs}
    except (OSError, ValueError) as error:
        print(f"bench.compare: {error}", file=sys.stderr)
        return 2
    print(compare(old, new))
    if peers:
        print("\n" + against(peers, new))
    return 0


if __name__ == "__main__":
    sys.exit(main())
