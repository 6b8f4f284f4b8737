"""Writes results as JSON files, with the conditions of the measurement."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def conditions() -> dict[str, Any]:
    """Date, commit, machine and versions, without names of persons or paths."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": _commit(),
        "python": sys.version.split()[0],
        "machine": _processor(),
        "cores": os.cpu_count(),
    }


def write(name: str, figures: dict[str, Any]) -> None:
    """Write `figures` to bench/results/NAME.json and print them."""
    print(save(name, figures))


def save(name: str, figures: dict[str, Any]) -> str:
    """Write `figures` to bench/results/NAME.json and return its text. Long runs call it after each case, so
    that an interruption loses no results."""
    text = json.dumps({"name": name, "conditions": conditions(), **figures}, indent=1)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(text + "\n")
    return text


def replace(path: Path, found: dict[str, Any]) -> None:
    """Write `found` to the list of results at `path`, in place of older ones of its `name`."""
    held: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    kept = [each for each in held if each["name"] != found["name"]]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([*kept, found], indent=1) + "\n")


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=RESULTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
