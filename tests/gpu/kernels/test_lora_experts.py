"""Experts whose rows have adapters, against the twin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels import reference
from bench.kernels.inputs import MoeInputs, MoeSize, error, moe_inputs, run_moe, scalar
from bench.kernels.lora_inputs import lora_matrix, lora_rows
from gpu.adapters import kernels as twin
from gpu.kernels.moe.gemm_config import TileConfig
from gpu.kernels.moe.tuned import MoeConfig
from gpu.lora import LoraExperts, LoraRows
from gpu.quant.scaled import quantise, restore

SIZE = MoeSize(experts=3, width=24, hidden=40, top_k=2)
PLAIN = TileConfig(32, 32, 4, 2, False)
UNEVEN = TileConfig(16, 64, 4, 2, False)
SWAP = TileConfig(32, 32, 4, 2, True)
HALF = SWAP._replace(half=True)
TALL = TileConfig(32, 32, 4, 2, False, tma=True)
LEFT = TileConfig(64, 64, 4, 2, False, tma=True)
LOW = TileConfig(64, 64, 4, 4, True)
WIDE = TileConfig(128, 64, 4, 4, True)


def expected(inputs: MoeInputs, adapters: tuple[LoraExperts, LoraRows]) -> Tensor:
    """The weighted sum of the rows' experts with their deltas, float32 inside."""
    x, logits, w13, w2 = inputs
    lora, rows = adapters
    weights, chosen = reference.route(logits, SIZE.top_k, True)
    pairs = chosen.flatten()
    both = torch.einsum("ni,noi->no", x.float().repeat_interleave(SIZE.top_k, 0), w13[pairs].float())
    twin.expand_experts(twin.shrink_experts(x, chosen, lora.up, rows), chosen, lora.up, rows, both)
    hidden = (F.silu(both[:, : SIZE.width]) * both[:, SIZE.width :]).to(x.dtype)
    out = torch.einsum("ni,noi->no", hidden.float(), w2[pairs].float())
    twin.expand_experts(twin.shrink_experts(hidden, chosen, lora.down, rows), chosen, lora.down, rows, out)
    return (out.view(*chosen.shape, -1) * weights[..., None]).sum(1)


def made(
    used: list[int], ranks: list[int], shared: bool, dtype: torch.dtype, device: torch.device
) -> tuple[MoeInputs, tuple[LoraExperts, LoraRows]]:
    inputs = moe_inputs(len(used), SIZE, dtype, device)
    inputs.logits[:, 0] += 9  # one expert's tiles are full
    every, one = SIZE.experts, 1 if shared else SIZE.experts
    up = lora_matrix(ranks, SIZE.hidden, (SIZE.width,) * 2, dtype, device, experts=(one, every))
    down = lora_matrix(ranks, SIZE.width, (SIZE.hidden,), dtype, device, experts=(every, one))
    return inputs, (LoraExperts(up, down), lora_rows(used, len(ranks), device))


def given(adapters: tuple[LoraExperts, LoraRows]) -> dict[str, Any]:
    """Arguments of `run_moe`."""
    return {"lora": adapters[0], "adapters": adapters[1]}


MIXED = [0, -1, 2, 2, 1, -1, 0, 1]


@pytest.mark.parametrize(
    ("used", "ranks", "shared", "config"),
    [
        ([1], [4, 16], False, MoeConfig(True, 16, PLAIN, PLAIN)),
        (MIXED, [9, 16, 3], False, MoeConfig(False, 16, PLAIN, UNEVEN)),
        (MIXED, [9, 16, 3], True, MoeConfig(False, 16, UNEVEN, SWAP)),
        ([-1] * 5, [8], False, MoeConfig(False, 16, PLAIN, SWAP)),
        # More in a tile than are taken at a time, of gate and up 2, of down 4 with these ranks.
        ([4, 0, 6, -1, 2, 5, 1, 3, 6, 2], [16, 3, 9, 0, 20, 1, 8], False, MoeConfig(False, 16, PLAIN, SWAP)),
        ([0] * 20 + MIXED, [8, 0, 20], True, MoeConfig(False, 32, HALF, SWAP)),
        ([1] * 70 + [0] * 65, [16, 5], False, MoeConfig(False, 192, TALL, LEFT)),
        # Products of one step over K on a GPU's tensor cores, and deltas there too.
        (MIXED * 16, [9, 20, 3], False, MoeConfig(False, 64, LOW, WIDE)),
    ],
    ids=["one", "mixed", "shared", "none", "many", "half", "tall", "one step"],
)
def test_adapters_of_experts(
    used: list[int],
    ranks: list[int],
    shared: bool,
    config: MoeConfig,
    device: torch.device,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    inputs, adapters = made(used, ranks, shared, dtype, device)
    weights = inputs.w13, inputs.w2
    found = run_moe(inputs.x, inputs.logits, weights, SIZE.top_k, config, **given(adapters))
    assert error(found, expected(inputs, adapters)) < tolerance


@pytest.mark.usefixtures("rounding")
def test_adapters_of_fp8_experts(device: torch.device, dtype: torch.dtype) -> None:
    """The deltas are of rows and weights that are not quantised."""
    inputs, adapters = made(MIXED, [9, 16, 3], False, dtype, device)
    (w13, s13), (w2, s2) = quantise(inputs.w13), quantise(inputs.w2)
    cut = MoeConfig(False, 16, PLAIN, PLAIN)
    found = run_moe(
        inputs.x,
        inputs.logits,
        (w13, w2),
        SIZE.top_k,
        cut,
        (s13, s2),
        **given(adapters),
    )
    exact = inputs._replace(w13=restore(w13, s13).to(dtype), w2=restore(w2, s2).to(dtype))
    assert error(found, expected(exact, adapters)) < 0.05


def test_padded_rows_have_no_delta(device: torch.device, dtype: torch.dtype, tolerance: float) -> None:
    inputs, adapters = made([*MIXED, -1, -1], [9, 16, 3], False, dtype, device)
    inputs.x[-2:] = inputs.logits[-2:] = float("nan")
    live, cut = scalar(len(MIXED), device), MoeConfig(False, 16, PLAIN, SWAP)
    weights = inputs.w13, inputs.w2
    found = run_moe(
        inputs.x,
        inputs.logits,
        weights,
        SIZE.top_k,
        cut,
        **given(adapters),
        num_rows=live,
    )
    true = inputs._replace(x=inputs.x[:-2], logits=inputs.logits[:-2])
    lora, rows = adapters
    assert error(found[:-2], expected(true, (lora, rows.first(len(MIXED))))) < tolerance
