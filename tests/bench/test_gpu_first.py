"""`bench/gpu_first.sh` must list every test of captured steps, because it runs them by name."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_of_captured_steps_is_listed() -> None:
    script = (ROOT / "bench" / "gpu_first.sh").read_text()
    names = re.findall(r"^def test_(\w+)", (ROOT / "tests/gpu/test_cuda.py").read_text(), re.MULTILINE)
    assert len(names) > 10
    assert [name for name in names if name not in script] == []
