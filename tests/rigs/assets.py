"""Real tokenizers and models, if they are available."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from app.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]


def asset(name: str) -> Path:
    """`assets/NAME` in a directory next to the repository; skips the test if there is none."""
    found = next((path for path in ROOT.parent.glob(f"*/assets/{name}") if path.is_dir()), None)
    if found is None:
        pytest.skip(f"needs {name}, which is not part of the repository")
    return found


@functools.cache
def real_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of `assets/NAME`. Loading one takes half a second, so that the tests of a process share
    it."""
    return Tokenizer.load(asset(name), 200_000)


def template(name: str) -> str:
    """A real model's chat template: `tests/data/templates`."""
    return (ROOT / "tests/data/templates" / f"{name}.jinja").read_text(encoding="utf-8")
