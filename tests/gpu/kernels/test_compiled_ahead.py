"""Kernels that are compiled side by side, before they are launched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from bench.kernels.compile import _Device
from gpu.kernels import norm, silu_mul
from gpu.kernels.jit import compiled_ahead, only_compiling

driver.set_active(_Device())  # it compiles for sm_90 and can launch nothing
x, weight = torch.ones(8, 256, dtype=torch.bfloat16), torch.ones(256, dtype=torch.bfloat16)


def compiled():
    kernels = [each for module in (norm, silu_mul) for each in vars(module).values()]
    kernels = [each for each in kernels if isinstance(each, JITFunction)]
    return [one for each in kernels for cache in each.device_caches.values() for one in cache[0].values()]


with compiled_ahead():
    assert only_compiling()
    silu_mul.silu_mul(x)
    norm.rms_norm(x, weight, 1e-6)
assert not only_compiling()
assert len(compiled()) == 2 and all(one.asm["cubin"] for one in compiled())
try:
    silu_mul.silu_mul(x)
except AttributeError as error:
    assert "launcher" in str(error) or "utils" in str(error), error
    print("launched")
"""


def test_they_are_all_there_at_the_end_and_were_not_launched(tmp_path: Path) -> None:
    """Runs in a process of its own: with Triton's interpreter, which the tests use, nothing is compiled."""
    unset = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=unset | {"TRITON_CACHE_DIR": str(tmp_path)},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "launched\n", done.stderr
