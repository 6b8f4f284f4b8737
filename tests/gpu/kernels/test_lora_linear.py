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
from gpu.adapters import kernels as twin
from gpu.kernels.gemm.delta import fits
from gpu.kernels.gemm.skinny import SkinnyConfig, skinny_gemm, split_k_counters
from gpu.kernels.lora.linear import Branch, lora_gated, lora_linear, shrink_ahead
from gpu.kernels.moe.gemm_config import TileConfig
from gpu.kernels.moe.tuned import MoeConfig
from gpu.kernels.norm import rms_norm
from gpu.kernels.silu_mul import silu_mul


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
    twin.expand(twin.shrink(x, lora, rows), lora, rows, expected)
    call = lora_gated if gated else lora_linear
    found = call(x, lora, rows, Branch(device), lambda: F.linear(x, weight))
    assert error(found, silu_mul(expected) if gated else expected) < tolerance


# Places of the rows, ranks of the adapters (0: it does not change this matrix), outputs of the fused
# matrices, and the cut, with and without split-K.
EPILOGUES = [
    ([0] * 5, [16], (64,), SkinnyConfig(64, 64, 1, 4, 3)),
    ([2, -1, 0, 1, 2] * 4, [4, 0, 16], (128, 64, 64), SkinnyConfig(64, 128, 2, 4, 3)),
    ([row % 8 for row in range(33)], [16] * 8, (128,), SkinnyConfig(128, 64, 4, 8, 3)),
    ([-1] * 16, [8, 8], (64, 64), SkinnyConfig(64, 64, 1, 4, 2)),
]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("used", "ranks", "parts", "cut"), EPILOGUES)
def test_deltas_in_the_epilogue_of_a_product(
    used: list[int],
    ranks: list[int],
    parts: tuple[int, ...],
    cut: SkinnyConfig,
    gated: bool,
    device: torch.device,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    parts, cut = ((parts[0],) * 2, cut._replace(split=1)) if gated else (parts, cut)
    x, weight, bias = linear(len(used), sum(parts), 768, device, dtype)
    lora, rows = lora_matrix(ranks, 768, parts, dtype, device), lora_rows(used, len(ranks), device)
    assert fits(lora, cut.block_n)
    expected = F.linear(x, weight, bias)
    twin.expand(twin.shrink(x, lora, rows), lora, rows, expected)
    counters, pdl = split_k_counters(device), device.type == "cuda" and hopper()
    delta = shrink_ahead(x, lora, rows, pdl=pdl)
    delta[0].h[:, [row for row, place in enumerate(used) if place < 0 or not ranks[place]]] = float("nan")
    found = skinny_gemm(x, weight, bias, cut, counters, gated=gated, delta=delta, pdl=pdl)
    assert error(found, silu_mul(expected) if gated else expected) < tolerance
    assert not counters.any()


def hopper() -> bool:
    return torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.gpu
@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize("cut", [SkinnyConfig(64, 128, 2, 4, 6), SkinnyConfig(64, 128, 1, 4, 6)])
def test_a_product_waits_for_what_its_epilogue_adds(device: torch.device, cut: SkinnyConfig) -> None:
    """The product begins before `shrink` has ended: every replay finds what one kernel after the other
    does."""
    x, weight, _ = linear(32, 4096, 4096, device, torch.bfloat16)
    lora = lora_matrix([16] * 8, 4096, (4096,), torch.bfloat16, device)
    rows, scale = lora_rows([row % 8 for row in range(32)], 8, device), x.new_ones(4096)
    counters = split_k_counters(device)

    def layers(pdl: bool) -> torch.Tensor:
        y = x
        for _ in range(20):
            given = rms_norm(y, scale, 1e-6, pdl=pdl)
            delta = shrink_ahead(given, lora, rows, pdl=pdl)
            y = skinny_gemm(given, weight, None, cut, counters, delta=delta, pdl=pdl)
        return y

    expected = layers(False)
    assert expected.isfinite().all()
    captured = capture([lambda: layers(hopper())])
    for _ in range(50):
        captured.graph.replay()
        assert torch.equal(captured.results[0], expected)


@pytest.mark.gpu
@pytest.mark.usefixtures("captures")
def test_branches_of_a_graph_are_joined(device: torch.device) -> None:
    """Every replay finds what the linear order does, whatever runs beside what."""
    pdl = hopper()
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
