"""The HTTP path of this tree against another commit's, interleaved on the same machine.

    python -m bench.app.ab --base REV

Absolute figures of `bench.app.http` vary with the load of a shared host by up to a factor of two; the ratio
of two interleaved trees does not. Each round runs both, in the reverse order of the round before.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.flags import command
from bench.results import write

ROOT = Path(__file__).parents[2]
STEP = 1e-3
"""Seconds of a simulated step: short enough to saturate the event loop."""

ONE = f"""
import sys
import uvloop
from app.server import SWITCH_SECONDS
from bench.app.http import measure
if __name__ == "__main__":
    sys.setswitchinterval(SWITCH_SECONDS)
    found = uvloop.run(measure({STEP}))
    print(found["tokens_per_s"], found["tokens_per_cpu_s"], found["loop_lag_p99_ms"])
"""


def main() -> None:
    """Measure and write bench/results/http_ab.json."""
    parser = command(__doc__)
    parser.add_argument("--base", required=True, help="commit to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base, script = Path(folder) / "base", Path(folder) / "one.py"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(base)], check=True)
        subprocess.run(["git", "checkout", "--quiet", args.base], cwd=base, check=True)
        script.write_text(ONE)
        found: dict[str, list[list[float]]] = {"base": [], "here": []}
        for turn in range(args.rounds):
            trees = [("base", base), ("here", ROOT)]
            for name, tree in trees if turn % 2 else reversed(trees):
                found[name].append(_once(script, tree))
                print(name, *found[name][-1], flush=True)
    columns = ("tokens_per_s", "tokens_per_cpu_s", "loop_lag_p99_ms")
    median = {
        name: {
            key: statistics.median(column)
            for key, column in zip(columns, zip(*runs, strict=True), strict=True)
        }
        for name, runs in found.items()
    }
    ratio = round(median["here"]["tokens_per_cpu_s"] / median["base"]["tokens_per_cpu_s"], 3)
    write("http_ab", {"base": args.base, "runs": found, "median": median, "ratio": ratio})


def _once(script: Path, tree: Path) -> list[float]:
    """Tokens per second, tokens per CPU second, p99 event loop lag in ms."""
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
        cwd=tree,
        capture_output=True,
        text=True,
        check=True,
    )
    return [float(word) for word in done.stdout.split()[-3:]]


if __name__ == "__main__":
    main()
