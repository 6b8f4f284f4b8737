"""On a GPU the kernels run as they are, in bfloat16; without one, in Triton's interpreter, in float32
(it computes bfloat16 matrix products wrongly)."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu.quant.scaled import FP8, quantise, quantise_groups

# Read when Triton is first imported: functions decorated before it was set cannot be interpreted.
if not torch.cuda.is_available():
    assert "triton" not in sys.modules, "a test file elsewhere imports Triton: import it within the test"
    os.environ["TRITON_INTERPRET"] = "1"

collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def interpreter() -> None:
    if not torch.cuda.is_available():
        from tests.rigs.interpreter import speed_up

        speed_up()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


@pytest.fixture(scope="session")
def tolerance(device: torch.device) -> float:
    """Relative to the norm of the result."""
    return 1e-2 if device.type == "cuda" else 1e-5


@pytest.fixture
def rounding(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter rounds to e4m3 wrongly where the exponent must grow: there the twin does it."""

    from gpu.kernels.gemm.quant import quantise_rows  # Triton, which reads above whether to interpret

    def twin(
        x: torch.Tensor, dtype: torch.dtype, *, group: int = 0, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if dtype != FP8:
            return quantise_rows(x, dtype, **more)
        return quantise_groups(x) if group else quantise(x)

    if device.type == "cpu":
        for place in ("gpu.ops.scaled", "gpu.kernels.moe.fused"):
            monkeypatch.setattr(f"{place}.quantise_rows", twin)


@pytest.fixture
def captures() -> None:
    """Skip tests that capture a graph where they cannot: its tensors come from torch's cache of memory, which
    a memory checker turns off."""
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") == "1":
        pytest.skip("no graph allocates without torch's cache of memory")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(7)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A kernel computes on lanes whose result it drops; in the interpreter numpy complains about those."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
