"""One JSON file a figure, with the conditions it was measured under."""

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
    """Date, machine and versions. Nothing that names a person or a path."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": _commit(),
        "python": sys.version.split()[0],
        "machine": _processor(),
        "cores": os.cpu_count(),
    }


def write(name: str, figures: dict[str, Any]) -> None:
    """Keep `figures` under bench/results/NAME.json and show them."""
    print(keep(name, figures))


def keep(name: str, figures: dict[str, Any]) -> str:
    """The text that bench/results/NAME.json holds now. A long run calls it after each of its cases:
    whatever cuts it off leaves those that were measured."""
    text = json.dumps({"name": name, "conditions": conditions(), **figures}, indent=1)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(text + "\n")
    return text


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
