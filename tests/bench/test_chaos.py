"""Every row of `bench.chaos` at a small scale: its claim holds, and its injected fault is detected."""

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
    """Run the suite; its results by row."""
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
    results = chaos(tmp_path / "out.json")
    assert sorted(results) == sorted(NAMES)
    assert {name: each["wrong"] for name, each in results.items() if not each["pass"]} == {}
    assert all({"row", "claim", "figure", "pass", "conditions"} <= set(each) for each in results.values())


def test_every_row_detects_its_fault(tmp_path: Path) -> None:
    results = chaos(tmp_path / "out.json", "--break")
    assert sorted(results) == sorted(NAMES)
    assert [name for name, each in results.items() if each["pass"]] == []
    # Detected by a check of the row, not by an exception that ended it.
    assert {name: each["wrong"] for name, each in results.items() if each["wrong"][0].startswith(ENDED)} == {}


def test_every_row_has_its_own_fault() -> None:
    faults = [row.fault for row in TABLE]
    assert set(faults) <= set(FAULTS)
    assert len(set(faults)) == len(faults)


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
