"""The script for a GPU host names each test there is for one: what it leaves out nobody runs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_test_of_captured_steps_is_left_out() -> None:
    script = (ROOT / "bench" / "gpu_first.sh").read_text()
    written = re.findall(r"^def test_(\w+)", (ROOT / "tests/gpu/test_cuda.py").read_text(), re.MULTILINE)
    assert len(written) > 10
    assert [name for name in written if name not in script] == []
