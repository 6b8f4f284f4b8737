"""Products of some rows against torch's, and where they are asked for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from bench.kernels.inputs import LINEARS, error, linear
from gpu.kernels.gemm.skinny import (
    Scales,
    SkinnyConfig,
    skinny_config,
    skinny_gemm,
    skinny_scaled_config,
    split_k_counters,
)
from gpu.ops.plain import product
from gpu.quant.scaled import INT8, quantise, quantise_blocks, quantise_groups

# (rows, outputs, inputs, cut): outputs that a tile does not divide and that end within one, inputs in one
# part and in several, parts of unequal length, rows that fill what they are padded to and that do not
SHAPES = [
    (5, 96, 320, SkinnyConfig(64, 64, 1, 4, 3)),
    (16, 64, 128, SkinnyConfig(64, 128, 1, 4, 2)),
    (24, 130, 448, SkinnyConfig(64, 64, 2, 4, 3)),
    (33, 128, 768, SkinnyConfig(128, 64, 4, 8, 3)),
    (64, 70, 512, SkinnyConfig(64, 128, 2, 4, 6)),
]
SPLIT = SHAPES[2]


@pytest.mark.parametrize(("rows", "outputs", "inputs", "cut"), SHAPES)
def test_linear(
    rows: int,
    outputs: int,
    inputs: int,
    cut: SkinnyConfig,
    device: torch.device,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    x, weight, bias = linear(rows, outputs, inputs, device, dtype)
    counters = split_k_counters(device)
    found = skinny_gemm(x, weight, bias, cut, counters)
    assert found.dtype == dtype
    assert error(found, F.linear(x.double(), weight.double(), bias.double())) < tolerance
    plain = skinny_gemm(x, weight, None, cut, counters)
    assert error(plain, F.linear(x.double(), weight.double())) < tolerance
    assert not counters.any()  # as the next product wants them


@pytest.mark.parametrize(("rows", "outputs", "inputs", "cut"), SHAPES)
def test_gated(
    rows: int,
    outputs: int,
    inputs: int,
    cut: SkinnyConfig,
    device: torch.device,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    x, weight, bias = linear(rows, outputs, inputs, device, dtype)
    gate, up = F.linear(x.double(), weight.double(), bias.double()).chunk(2, dim=1)
    whole = cut._replace(split=1, stages=min(cut.stages, 3))  # twice the weights
    found = skinny_gemm(x, weight, bias, whole, split_k_counters(device), gated=True)
    assert found.shape == (rows, outputs // 2)
    assert error(found, F.silu(gate) * up) < tolerance


# As SHAPES, the sides whole blocks; a tile ends at every 128 inputs where blocks have the scales
SCALED_SHAPES = [
    (1, 128, 256, SkinnyConfig(64, 128, 1, 4, 3)),
    (13, 256, 768, SkinnyConfig(128, 128, 2, 4, 3)),
    (33, 384, 1024, SkinnyConfig(64, 128, 4, 4, 3)),
    (64, 256, 512, SkinnyConfig(64, 256, 1, 4, 2)),
    (100, 128, 256, SkinnyConfig(64, 128, 1, 4, 2)),
]


@pytest.mark.parametrize("by_block", [False, True], ids=["rows", "blocks"])
@pytest.mark.parametrize(("rows", "outputs", "inputs", "cut"), SCALED_SHAPES)
def test_scaled(
    rows: int,
    outputs: int,
    inputs: int,
    cut: SkinnyConfig,
    by_block: bool,
    device: torch.device,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    x, made, bias = linear(rows, outputs, inputs, device, dtype)
    made[128:, :128] *= 8.0  # blocks that differ
    weight, scale = (quantise_blocks if by_block else quantise)(made)
    numbers, of_rows = (quantise_groups if by_block else quantise)(x)
    scales, counters = Scales(of_rows, scale), split_k_counters(device)
    if by_block:
        cut = cut._replace(block_k=128)
    for b in (bias, None):
        found = skinny_gemm(numbers, weight, b, cut, counters, scales=scales, dtype=dtype)
        expected = product(x.double(), weight, scale, None if b is None else b.double())
        assert (found.dtype, found.shape) == (dtype, (rows, outputs))
        assert error(found, expected) < tolerance
        if outputs // 2 % 128 == 0 or not by_block:
            gate, up = expected.chunk(2, dim=1)
            whole = cut._replace(split=1)
            found = skinny_gemm(numbers, weight, b, whole, counters, gated=True, scales=scales, dtype=dtype)
            assert error(found, F.silu(gate) * up) < tolerance
    assert not counters.any()


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "cut"),
    [
        (1, 96, 256, SkinnyConfig(64, 128, 1, 4, 3)),
        (13, 176, 640, SkinnyConfig(128, 128, 2, 4, 3)),
        (33, 48, 1024, SkinnyConfig(64, 64, 4, 4, 3)),
        (100, 128, 512, SkinnyConfig(64, 256, 1, 4, 2)),
    ],
)
def test_integers(
    rows: int,
    outputs: int,
    inputs: int,
    cut: SkinnyConfig,
    device: torch.device,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    """Outputs that a tile does not divide. Sums are exact, whoever adds them."""
    x, weight, bias = linear(rows, outputs, inputs, device, dtype)
    (numbers, by_row), (whole, scale) = quantise(x, INT8), quantise(weight, INT8)
    scales, counters = Scales(by_row, scale), split_k_counters(device)
    sums = numbers.double() @ whole.double().t()
    ones = Scales(torch.ones_like(by_row), torch.ones_like(scale))
    found = skinny_gemm(numbers, whole, None, cut, counters, scales=ones, dtype=torch.float32)
    assert torch.equal(found.double(), sums)
    expected = sums * by_row[:, None] * scale + bias.double()
    found = skinny_gemm(numbers, whole, bias, cut, counters, scales=scales, dtype=dtype)
    assert found.dtype == dtype and error(found, expected) < tolerance
    gate, up = expected.chunk(2, dim=1)
    once = cut._replace(split=1)
    found = skinny_gemm(numbers, whole, bias, once, counters, gated=True, scales=scales, dtype=dtype)
    assert error(found, F.silu(gate) * up) < tolerance
    assert not counters.any()


def test_a_row_is_its_own(device: torch.device, dtype: torch.dtype) -> None:
    """Whatever lies behind the rows, and in those that are padded; and a second run gives the same bits."""
    rows, outputs, inputs, cut = SPLIT
    x, weight, bias = linear(32, outputs, inputs, device, dtype)
    x[rows:] = float("nan")
    counters = split_k_counters(device)
    expected = skinny_gemm(x[:rows], weight, bias, cut, counters)
    assert expected.isfinite().all()
    assert torch.equal(skinny_gemm(x, weight, bias, cut, counters)[:rows], expected)
    x[rows - 1] = float("nan")
    assert torch.equal(skinny_gemm(x[:rows], weight, bias, cut, counters)[:-1], expected[:-1])


@pytest.mark.parametrize(
    ("name", "rows", "cut"),
    [
        ("8B qkv", 2, None),  # another's
        ("8B qkv", 8, SkinnyConfig(64, 128, 1, 4, 6)),
        ("8B o", 32, SkinnyConfig(64, 128, 2, 4, 6)),
        ("8B down", 64, SkinnyConfig(64, 128, 2, 4, 6)),
        ("8B down", 65, None),
        ("8B gate_up", 32, SkinnyConfig(128, 128, 1, 8, 3)),
        ("8B gate_up", 40, SkinnyConfig(64, 64, 1, 4, 4)),
        ("30B-A3B qkv", 32, SkinnyConfig(64, 64, 2, 4, 6)),
        ("30B-A3B qkv", 40, None),
        ("30B-A3B o", 64, SkinnyConfig(64, 128, 4, 4, 6)),
        ("30B-A3B router", 32, None),
    ],
)
def test_cut(name: str, rows: int, cut: SkinnyConfig | None) -> None:
    outputs, inputs, gated = LINEARS[name]
    weight = torch.empty(outputs, inputs, dtype=torch.bfloat16, device="meta")
    assert skinny_config(rows, weight, gated) == cut


@pytest.mark.parametrize("by_block", [False, True], ids=["rows", "blocks"])
def test_cuts_of_scaled_weights(by_block: bool) -> None:
    """Every program has whole tiles, and of blocks none has two in a tile."""
    for name, (outputs, inputs, gated) in LINEARS.items():
        weight = torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn, device="meta")
        cuts = [skinny_scaled_config(rows, weight, by_block, gated) for rows in (1, 16, 17, 32, 64, 65, 128)]
        if name.endswith("router"):
            assert not any(cuts)
            continue
        assert all(cuts[:5]) and not (by_block and any(cuts[5:]))
        for cut in filter(None, cuts):
            assert inputs // cut.block_k >= cut.split and not (gated and cut.split > 1)
            assert not by_block or (cut.block_k == 128 and 128 % cut.block_n == 0)
        assert skinny_scaled_config(65 if by_block else 129, weight, by_block, gated) is None
    odd = torch.empty(2 * 12_224, 4096, dtype=torch.float8_e4m3fn, device="meta")
    assert (skinny_scaled_config(8, odd, by_block, gated=True) is None) == by_block


@pytest.mark.parametrize(
    ("outputs", "inputs", "gated"),
    [
        (151_936, 4096, False),  # cuBLAS is as fast
        (34_816, 5120, True),  # more programs than two to a multiprocessor
        (4096, 4160, False),  # inputs that a tile does not divide
        (1024, 16_384, False),  # in more parts than were measured
    ],
)
@pytest.mark.parametrize("rows", [8, 64])
def test_library_has_the_rest(rows: int, outputs: int, inputs: int, gated: bool) -> None:
    weight = torch.empty(outputs, inputs, dtype=torch.bfloat16, device="meta")
    assert skinny_config(rows, weight, gated) is None
    small = torch.empty(4096, 4096, dtype=torch.float32, device="meta")
    assert skinny_config(rows, small) is None


@pytest.mark.parametrize(
    ("outputs", "inputs", "gated", "most"),
    [
        (960, 576, False, 32),
        (3072, 576, True, 64),
        (576, 1536, False, 0),  # long sums: cuBLAS's
        (3072, 560, True, 0),  # which a tile does not divide
        (49_152, 576, False, 0),  # a head
    ],
)
def test_small_models(outputs: int, inputs: int, gated: bool, most: int) -> None:
    weight = torch.empty(outputs, inputs, dtype=torch.bfloat16, device="meta")
    cuts = {rows: skinny_config(rows, weight, gated) for rows in (2, 3, 4, 8, 32, 40, 64, 65)}
    assert max((rows for rows, cut in cuts.items() if cut), default=0) == most
    assert cuts[2] is None
    assert {cut for cut in cuts.values() if cut} <= {SkinnyConfig(64, 64, 1, 4, 4)}
