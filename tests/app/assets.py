"""Where real tokenizers and models lie on machines that have them."""

from __future__ import annotations

from pathlib import Path

import pytest

ASSETS = Path(__file__).resolve().parents[3] / "shared" / "assets"


def asset(name: str) -> Path:
    """A directory of the assets; skips the test where they are absent."""
    path = ASSETS / name
    if not path.is_dir():
        pytest.skip(f"needs {name}, which is not among the repository's files")
    return path
