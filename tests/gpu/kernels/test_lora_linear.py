"""A product with its adapters on two branches of a graph; and the bench that times it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bench.kernels.inputs import MoeSize, error, linear
from bench.kernels.lora import Linear, Where, experts, linears, lists
from bench.kernels.lora_inputs import lora_matrix, lora_rows
from bench.kernels.timing import capture
from gpu.adapters.kernels import TorchLora
from gpu.kernels.lora.linear import Branch, lora_gated, lora_linear
from gpu.kernels.moe.gemm_config import TileConfig
from gpu.kernels.moe.tuned import MoeConfig
from gpu.kernels.norm import rms_norm
from gpu.kernels.silu_mul import silu_mul

TWIN = TorchLora()


def test_without_a_graph_a_branch_is_a_call(device: torch.device) -> None:
    branch, seen = Branch(device), []
    assert branch.run(lambda: seen.append("first")) is None
    seen.append("second")
    branch.join()
    assert seen == ["first", "second"]


@pytest.mark.parametrize("gated", [False, True])
def test_product_with_adapters(
    gated: bool, device: torch.device, dtype: torch.dtype, tolerance: float
) -> None:
    x, weight, _ = linear(6, 80, 64, device, dtype)
    lora = lora_matrix([3, 16], 64, (40, 40), dtype, device)
    rows = lora_rows([1, -1, 0, 1, -1, 0], 2, device)
    expected = F.linear(x, weight)
    TWIN.expand(TWIN.shrink(x, lora, rows), lora, rows, expected)
    call = lora_gated if gated else lora_linear
    found = call(x, lora, rows, Branch(device), lambda: F.linear(x, weight))
    assert error(found, silu_mul(expected) if gated else expected) < tolerance


@pytest.mark.gpu
@pytest.mark.usefixtures("captures")
def test_branches_of_a_graph_are_joined(device: torch.device) -> None:
    """Every replay finds what the linear order does, whatever runs beside what."""
    pdl = torch.cuda.get_device_capability() == (9, 0)
    x, weight, _ = linear(32, 4096, 4096, device, torch.bfloat16)
    lora = lora_matrix([16] * 8, 4096, (4096,), torch.bfloat16, device)
    rows = lora_rows([row % 8 for row in range(32)], 8, device)
    branch, scale = Branch(device), x.new_ones(4096)

    def layers(branch: Branch | None) -> torch.Tensor:
        y = x
        for _ in range(20):
            given = rms_norm(y, scale, 1e-6, pdl=pdl)
            y = lora_linear(given, lora, rows, branch, partial(F.linear, given, weight), pdl=pdl)
        return y

    expected = layers(None)
    assert expected.isfinite().all()
    captured = capture([lambda: layers(branch)])
    for _ in range(20):
        captured.graph.replay()
        assert torch.equal(captured.results[0], expected)


def test_the_bench_runs(device: torch.device, dtype: torch.dtype) -> None:
    def once(calls: Sequence[Callable[[], Any]]) -> float:
        calls[0]()
        return 1.0

    where = Where(device, dtype, False, once, cold=0.0)
    names = [line.name for line in linears("tiny", Linear((16, 16), 32), 2, 2, where)]
    assert names == [
        "shrink", "expand_silu", "norm, product", "  lora, one after another", "  lora, branch",
    ]  # fmt: skip
    cut = TileConfig(32, 32, 4, 2, False)
    size = MoeSize(experts=2, width=16, hidden=32, top_k=1)
    found = [*experts(size, 1, 2, where, MoeConfig(False, 16, cut, cut)), *lists(3, 2, where)]
    assert [line.name for line in found] == ["moe + norm", "  lora", "lay_out"]
    assert all(line.bytes > 0 and line.line() for line in found)
