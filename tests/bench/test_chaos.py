"""Every row of `bench.chaos` at a small size: its claim holds, and its seeded fault is noticed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.chaos.faults import FAULTS
from bench.chaos.main import ENDED
from bench.chaos.rows import TABLE
from bench.chaos.tiny import ROOT
from tests.rigs.wait import PATIENCE

FEW = ("--scale", "0.01", "--soak", "1")
NAMES = [row.name for row in TABLE]


def chaos(out: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    """What the suite wrote, by row."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "bench.chaos",
            "--scale",
            "0.01",
            "--soak",
            "1",
            "--out",
            str(out),
            *arguments,
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )
    assert out.exists(), done.stdout + done.stderr
    return {each["row"]: each for each in json.loads(out.read_text())}


def test_every_row_holds(tmp_path: Path) -> None:
    told = chaos(tmp_path / "out.json")
    assert sorted(told) == sorted(NAMES)
    assert {name: each["wrong"] for name, each in told.items() if not each["pass"]} == {}
    assert all({"row", "claim", "figure", "pass", "conditions"} <= set(each) for each in told.values())


def test_every_row_notices_its_fault(tmp_path: Path) -> None:
    told = chaos(tmp_path / "out.json", "--break")
    assert sorted(told) == sorted(NAMES)
    assert [name for name, each in told.items() if each["pass"]] == []
    # By what it looks for: a row that cannot go on has noticed nothing.
    assert {name: each["wrong"] for name, each in told.items() if each["wrong"][0].startswith(ENDED)} == {}


def test_every_seed_is_a_fault_and_no_fault_two_rows_seed() -> None:
    seeds = [row.seed for row in TABLE]
    assert set(seeds) <= set(FAULTS)
    assert len(set(seeds)) == len(seeds)


def test_a_row_that_does_not_exist_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.chaos", "--only", "nothing"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 2
    assert re.search("no row 'nothing'", done.stderr)
