"""JSON schemas with instances: those of MaskBench, and those of the official suite."""

from __future__ import annotations

import argparse
import json
import lzma
import random
from pathlib import Path
from typing import Any, NamedTuple

WIDTH = 151_936
"""Logits of the Qwen3 models: 267 more than tokens in the tokenizer."""
ENDS = (151_645, 151_643)
SEED = 0


class Case(NamedTuple):
    """One schema of the data set, and its instances with their labels."""

    path: str
    schema: Any
    tests: list[tuple[Any, bool]]


def cases(data: Path) -> list[Case]:
    """All schemas, shuffled."""
    found = []
    with lzma.open(data, "rt") as lines:
        for line in lines:
            entry = json.loads(line)
            tests = [(test["data"], test["valid"]) for test in entry["case"]["tests"]]
            found.append(Case(entry["path"], entry["case"]["schema"], tests))
    random.Random(SEED).shuffle(found)
    return found


def suite(directory: Path) -> list[Case]:
    """The groups of the official suite's draft 2020-12, with formats as assertions. `format.json`, which
    expects formats as annotations, is left out."""
    found = []
    root = directory / "tests" / "draft2020-12"
    for path in sorted([*root.glob("*.json"), *root.glob("optional/**/*.json")]):
        if path != root / "format.json":
            for group in json.loads(path.read_text()):
                tests = [(test["data"], test["valid"]) for test in group["tests"]]
                found.append(Case(str(path.relative_to(root)), group["schema"], tests))
    return found


def add_sources(parser: argparse.ArgumentParser) -> None:
    """Add the flags for schemas and tokenizer."""
    parser.add_argument(
        "--data", type=Path, help="MaskBench's schemas with their tests, one JSON object a line, as .jsonl.xz"
    )
    parser.add_argument("--tokenizer", type=Path, required=True, help="directory with Qwen3's tokenizer")
