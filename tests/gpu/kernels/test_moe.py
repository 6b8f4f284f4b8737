"""The whole expert MLP, by each of its ways, against the twin."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from bench.kernels import reference
from bench.kernels.inputs import MoeInputs, MoeSize, error, moe_inputs, moe_int4, run_moe, scalar
from core.models import ClampedGate
from gpu.experts import Experts
from gpu.kernels.moe.few_rows import FewRowsConfig, few_rows_moe
from gpu.kernels.moe.fused import fused_moe
from gpu.kernels.moe.gemm_config import TileConfig
from gpu.kernels.moe.tuned import MoeConfig
from gpu.kernels.norm import rms_norm
from gpu.quant import mxfp4
from gpu.quant.scaled import EIGHT_BITS, quantise, quantise_blocks

SIZE = MoeSize(experts=6, width=48, hidden=96, top_k=2)
PLAIN = TileConfig(32, 32, 4, 2, False)
UNEVEN = TileConfig(32, 64, 4, 2, False)  # 64 divides neither 96 nor 48
SWAP = TileConfig(32, 32, 4, 2, True)
HALF = TileConfig(32, 16, 4, 2, False, half=True)
WIDE = HALF._replace(block_k=32)  # the least of FP8
TMA = TileConfig(32, 16, 4, 2, True, half=True, tma=True)
TALL = TileConfig(32, 32, 4, 2, False, tma=True)
LEFT = TileConfig(64, 64, 4, 2, False, tma=True)  # columns and sums that neither width nor hidden size fill


def run(inputs: MoeInputs, config: MoeConfig, live: int) -> torch.Tensor:
    count = scalar(live, inputs.x.device)
    weights = inputs.w13, inputs.w2
    return run_moe(inputs.x, inputs.logits, weights, SIZE.top_k, config, num_rows=count)


@pytest.mark.parametrize(
    ("rows", "live", "config"),
    [
        (3, 2, MoeConfig(True, 16, PLAIN, PLAIN)),
        (11, 9, MoeConfig(False, 16, PLAIN, UNEVEN)),
        (11, 11, MoeConfig(False, 16, UNEVEN, SWAP)),
        (70, 66, MoeConfig(False, 64, HALF, HALF)),
        (20, 20, MoeConfig(False, 32, TMA, TMA)),
        (150, 147, MoeConfig(False, 192, TALL, LEFT)),
        (170, 170, MoeConfig(False, 192, LEFT, TALL)),
    ],
    ids=["small", "plain", "swap", "half", "tma", "tall", "taller"],
)
def test_fused_moe(
    rows: int,
    live: int,
    config: MoeConfig,
    device: torch.device,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    inputs = moe_inputs(rows, SIZE, dtype, device)
    inputs.logits[:, 0] += 3  # one expert's tiles are full
    inputs.x[live:] = float("nan")  # padded rows may hold anything
    inputs.logits[live:] = float("nan")
    found = run(inputs, config, live)
    x, logits, w13, w2 = inputs
    assert error(found[:live], reference.moe(x[:live], logits[:live], w13, w2, SIZE.top_k)) < tolerance


@pytest.mark.parametrize(
    ("rows", "live", "config"),
    [
        (3, 2, MoeConfig(True, 16, PLAIN, PLAIN)),
        (11, 9, MoeConfig(False, 16, SWAP, UNEVEN)),
        (70, 70, MoeConfig(False, 192, LEFT, TALL)),
    ],
    ids=["small", "tiles", "tall"],
)
def test_biases_and_a_clamped_gate(
    rows: int,
    live: int,
    config: MoeConfig,
    device: torch.device,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    x, logits, w13, w2 = moe_inputs(rows, SIZE, dtype, device)
    w13 *= 3  # both limits are reached
    up, down = (torch.randn(SIZE.experts, w.shape[1], device=device).to(dtype) for w in (w13, w2))
    clamped = ClampedGate(alpha=1.7, limit=2.0)
    layer = Experts(w13, w2, SIZE.top_k, biases=(up, down), clamped=clamped)
    found = fused_moe(x, logits, layer, config, None, num_rows=scalar(live, device))
    args = x[:live], logits[:live], w13, w2, SIZE.top_k
    assert error(found[:live], reference.moe(*args, biases=(up, down), clamped=clamped)) < tolerance


@pytest.mark.parametrize(
    ("rows", "live", "config"),
    [
        (3, 2, MoeConfig(True, 16, WIDE, UNEVEN)),  # few rows have no kernel of their own
        (40, 38, MoeConfig(False, 16, SWAP._replace(block_n=64), UNEVEN)),
    ],
    ids=["few", "some"],
)
def test_mxfp4_weights(
    rows: int,
    live: int,
    config: MoeConfig,
    device: torch.device,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    """MXFP4 experts give the output of their dequantised weights, and read nothing behind the last group."""
    size = MoeSize(experts=6, width=96, hidden=160, top_k=2)
    x, logits, *weights = moe_inputs(rows, size, dtype, device)
    scale = torch.tensor([2.0**-100, 1.0, 2.0**-20, 1.0, 1.0], device=device).repeat_interleave(32)
    packed = [mxfp4.quantise(w.float() * scale[: w.shape[2]]) for w in weights]
    w13, w2 = (mxfp4.restore(*each) for each in packed)
    up, down = (torch.randn(size.experts, w.shape[1], device=device).to(dtype) for w in (w13, w2))
    more = {"biases": (up, down), "clamped": ClampedGate(alpha=1.7, limit=2.0)}
    (n13, s13), (n2, s2) = (mxfp4.pack_all(*each) for each in packed)
    layer = Experts(n13, n2, size.top_k, scales=(s13, s2), **more)
    found = fused_moe(x, logits, layer, config, None, num_rows=scalar(live, device))
    want = reference.moe(x[:live], logits[:live], w13, w2, size.top_k, **more)
    assert error(found[:live], want) < tolerance


@pytest.mark.parametrize(
    ("rows", "live", "group", "config"),
    [
        (3, 2, 32, MoeConfig(False, 16, WIDE, UNEVEN)),
        (40, 38, 128, MoeConfig(False, 16, SWAP._replace(block_n=64), UNEVEN)),
        (9, 9, 64, MoeConfig(False, 16, UNEVEN, SWAP)),
        (9, 7, 0, MoeConfig(False, 32, HALF, HALF)),
    ],
    ids=["by 32", "some, by 128", "by 64", "by output"],
)
def test_weights_of_4_bits(
    rows: int,
    live: int,
    group: int,
    config: MoeConfig,
    device: torch.device,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    """4-bit experts give the output of the weights that they stand for. Numbers of a word are 64 apart in one
    matrix and 32 in the other."""
    size = MoeSize(experts=4, width=128, hidden=512, top_k=2)
    x, logits, *weights = moe_inputs(rows, size, dtype, device)
    x[live:] = float("nan")  # padded rows may hold anything
    logits[live:] = float("nan")
    for weight in weights:
        weight += 0.5 * weight.abs().amax()  # zero points that are not the middle
    (n13, s13, w13), (n2, s2, w2) = (moe_int4(w, group or w.shape[2], dtype) for w in weights)
    layer = Experts(n13, n2, size.top_k, scales=(s13, s2))
    found = fused_moe(x, logits, layer, config, None, num_rows=scalar(live, device))
    want = reference.moe(x[:live], logits[:live], w13, w2, size.top_k)
    assert error(found[:live], want) < tolerance


@pytest.mark.parametrize("group", [32, 128, 0])
def test_few_rows_of_4_bits(group: int, device: torch.device, dtype: torch.dtype, tolerance: float) -> None:
    """Words of an output in two pieces, the second short; steps that leave a rest of columns."""
    size = MoeSize(experts=4, width=128, hidden=1280, top_k=2)
    x, logits, *weights = moe_inputs(2, size, dtype, device)
    logits[1:] = x[1:] = float("nan")  # padded rows may hold anything
    for weight in weights:
        weight += 0.5 * weight.abs().amax()  # zero points that are not the middle
    (n13, s13, w13), (n2, s2, w2) = (moe_int4(w, group or w.shape[2], dtype) for w in weights)
    up, down = (torch.randn(size.experts, w.shape[1], device=device).to(dtype) for w in (w13, w2))
    layer = Experts(n13, n2, size.top_k, scales=(s13, s2), biases=(up, down))
    found, _ = few_rows_moe(x, logits, layer, num_rows=scalar(1, device), config=FewRowsConfig(4, 3, 128, 8))
    want = reference.moe(x[:1], logits[:1], w13, w2, size.top_k, biases=(up, down))
    assert error(found[:1], want) < tolerance


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "config"),
    [
        (90, MoeConfig(False, 16, TileConfig(64, 128, 4, 3, True), TileConfig(64, 128, 4, 3, True))),
        (
            600,
            MoeConfig(False, 64, TileConfig(64, 64, 4, 4, True), TileConfig(128, 64, 4, 4, True, tma=True)),
        ),
        (2500, MoeConfig(False, 192, TileConfig(128, 64, 8, 4, False), TileConfig(256, 64, 8, 4, False))),
    ],
    ids=["plain", "tma", "tall"],
)
def test_down_begins_where_gate_up_is_done(rows: int, config: MoeConfig, device: torch.device) -> None:
    """Under dependent launch a tile waits for its own rows alone: none may read what a call before left."""
    size = MoeSize(experts=64, width=768, hidden=2048, top_k=8)
    steps = [moe_inputs(rows, size, torch.bfloat16, device) for _ in range(2)]
    weights = steps[0].w13, steps[0].w2
    expected = [run_moe(x, logits, weights, size.top_k, config) for x, logits, *_ in steps]
    for turn in range(60):
        x, logits, *_ = steps[turn % 2]
        found = run_moe(x, logits, weights, size.top_k, config, pdl=True)
        assert torch.equal(found, expected[turn % 2])


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(
    ("size", "config"),
    [
        (MoeSize(10, 20, 264, 3), FewRowsConfig(4, 2, 32, 8)),  # hidden in two pieces, the second short
        (
            MoeSize(6, 300, 32, 2),
            FewRowsConfig(4, 4, 8, 4),
        ),  # width likewise; steps leave a rest of columns
    ],
)
def test_few_rows(
    size: MoeSize,
    config: FewRowsConfig,
    renormalise: bool,
    device: torch.device,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    inputs = moe_inputs(3, size, dtype, device)
    inputs.logits[2:] = inputs.x[2:] = float("nan")  # padded rows may hold anything
    x, logits, w13, w2 = inputs
    layer = Experts(w13, w2, size.top_k, renormalise)
    found, routing = few_rows_moe(x, logits, layer, num_rows=scalar(2, device), config=config)
    weights, experts = reference.route(logits[:2], size.top_k, renormalise)
    assert routing.experts.tolist() == [*experts.tolist(), [-1] * size.top_k]
    assert error(routing.weights[:2], weights) < 1e-5
    scale = routing.weights[:2].sum(1, keepdim=True).to(dtype)
    expected = reference.moe(x[:2], logits[:2], w13, w2, size.top_k) * scale  # 1 where renormalised
    assert error(found[:2], expected) < tolerance


def test_few_rows_are_added_to_a_residual(device: torch.device) -> None:
    """The sums have the same bits as by the norm's kernel. Padding is not written."""
    x, logits, w13, w2 = moe_inputs(3, SIZE, torch.bfloat16, device)
    layer, count, config = Experts(w13, w2, SIZE.top_k), scalar(2, device), FewRowsConfig(4, 3, 128, 8)
    residual = torch.randn_like(x)
    made, _ = few_rows_moe(x, logits, layer, num_rows=count, config=config)
    want = residual.clone()
    rms_norm(made, x[0], 1e-5, residual=want, num_rows=count)
    found, _ = few_rows_moe(x, logits, layer, residual=residual, num_rows=count, config=config)
    assert found is residual
    assert torch.equal(found, want)


def test_few_rows_of_ties_go_to_the_lowest_experts(device: torch.device, dtype: torch.dtype) -> None:
    inputs = moe_inputs(1, SIZE, dtype, device)
    inputs.logits[0] = torch.tensor([0.0, 1.0, -0.0, 1.0, 1.0, 0.0])
    _, routing = few_rows_moe(inputs.x, inputs.logits, Experts(inputs.w13, inputs.w2, 4))
    assert routing.experts.tolist() == [[1, 3, 4, 0]]


def test_whatever_the_logits_no_expert_is_out_of_bounds(device: torch.device, dtype: torch.dtype) -> None:
    """An address out of bounds would cost the process its device."""
    inputs = moe_inputs(2, SIZE, dtype, device)
    inputs.logits[0] = float("nan")
    inputs.logits[1] = -float("inf")
    _, routing = few_rows_moe(inputs.x, inputs.logits, Experts(inputs.w13, inputs.w2, SIZE.top_k))
    assert routing.experts.tolist() == [[0, 1], [0, 1]]


Scaled = tuple[MoeInputs, tuple[torch.Tensor, torch.Tensor]]


def coarse(inputs: MoeInputs, how: Callable[..., tuple[torch.Tensor, torch.Tensor]] = quantise) -> Scaled:
    """The inputs with weights of 8 bits, and their scales."""
    w13, s13 = how(inputs.w13)
    w2, s2 = how(inputs.w2)
    return inputs._replace(w13=w13, w2=w2), (s13, s2)


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("kind", EIGHT_BITS, ids=str)
@pytest.mark.parametrize(
    ("rows", "live", "config"),
    [
        (3, 2, MoeConfig(True, 16, PLAIN, PLAIN)),
        (11, 9, MoeConfig(False, 16, PLAIN, UNEVEN)),
        (11, 11, MoeConfig(False, 16, UNEVEN, SWAP)),
        (70, 66, MoeConfig(False, 64, WIDE, WIDE)),
        (20, 20, MoeConfig(False, 32, TMA._replace(block_k=32), TMA._replace(block_k=32))),
    ],
    ids=["small", "plain", "swap", "half", "tma"],
)
def test_experts_scaled_by_rows(
    kind: torch.dtype,
    rows: int,
    live: int,
    config: MoeConfig,
    device: torch.device,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    inputs, scales = coarse(moe_inputs(rows, SIZE, dtype, device), partial(quantise, dtype=kind))
    inputs.x[live:] = float("nan")  # padded rows may hold anything
    inputs.logits[live:] = float("nan")
    x, logits, w13, w2 = inputs
    count = scalar(live, device)
    found = run_moe(x, logits, (w13, w2), SIZE.top_k, config, scales=scales, num_rows=count)
    # The kernel for few rows does not quantise its input. The others do, and inputs that differ in their last
    # bit may be rounded to different 8-bit values.
    expected = reference.moe(
        x[:live], logits[:live], w13, w2, SIZE.top_k, scales=scales, coarse=not config.small
    )
    assert found.dtype == dtype
    assert error(found[:live], expected) < (tolerance if config.small else 1e-2)


WHOLE_BLOCKS = MoeSize(4, 128, 256, 2)

BY_BLOCK = TileConfig(64, 128, 4, 2, False)


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize(
    ("rows", "live", "config"),
    [
        (2, 1, MoeConfig(True, 16, PLAIN, PLAIN)),
        (11, 9, MoeConfig(False, 16, BY_BLOCK, BY_BLOCK._replace(block_n=128))),
        (11, 11, MoeConfig(False, 16, BY_BLOCK._replace(swap=True), BY_BLOCK._replace(swap=True))),
        (70, 66, MoeConfig(False, 64, BY_BLOCK._replace(half=True, tma=True), BY_BLOCK)),
    ],
    ids=["small", "plain", "swap", "half, tma"],
)
def test_experts_scaled_by_blocks(
    rows: int, live: int, config: MoeConfig, device: torch.device, dtype: torch.dtype, tolerance: float
) -> None:
    made = moe_inputs(rows, WHOLE_BLOCKS, dtype, device)
    made.w13[:, 128:, :128] *= 4.0  # blocks that differ
    inputs, scales = coarse(made, quantise_blocks)
    inputs.x[live:] = float("nan")
    inputs.logits[live:] = float("nan")
    x, logits, w13, w2 = inputs
    found = run_moe(
        x, logits, (w13, w2), WHOLE_BLOCKS.top_k, config, scales=scales, num_rows=scalar(live, device)
    )
    expected = reference.moe(
        x[:live], logits[:live], w13, w2, WHOLE_BLOCKS.top_k, scales=scales, coarse=not config.small
    )
    assert error(found[:live], expected) < (tolerance if config.small else 1e-2)


def test_unused_experts_are_not_read(device: torch.device, dtype: torch.dtype) -> None:
    for rows, config in ((2, MoeConfig(True, 16, PLAIN, PLAIN)), (9, MoeConfig(False, 16, SWAP, SWAP))):
        inputs = moe_inputs(rows, SIZE, dtype, device)
        inputs.logits[:, 3] = -50.0
        expected = run(inputs, config, rows)
        inputs.w13[3] = float("nan")
        inputs.w2[3] = float("nan")
        assert torch.equal(run(inputs, config, rows), expected)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("small", [True, False])
def test_sum_add_and_norm(
    small: bool, keeps: bool, device: torch.device, dtype: torch.dtype, tolerance: float
) -> None:
    rows, live = 4, 3
    inputs = moe_inputs(rows, SIZE, dtype, device)
    config = MoeConfig(small, 16, SWAP, PLAIN)
    residual = torch.randn(rows, SIZE.hidden, device=device).to(dtype)
    weight = torch.rand(SIZE.hidden, device=device).to(dtype)
    before = residual.clone()
    x, logits, w13, w2 = inputs
    kept = torch.full((rows, 2 * SIZE.hidden), -1.0, device=device, dtype=dtype)
    found = fused_moe(
        x,
        logits,
        Experts(w13, w2, SIZE.top_k),
        config,
        (residual, weight, 1e-6),
        keep=kept[:, SIZE.hidden :] if keeps else None,
        num_rows=scalar(live, device),
    )
    expected = before[:live] + reference.moe(x[:live], logits[:live], w13, w2, SIZE.top_k)
    assert error(residual[:live], expected) < tolerance
    assert torch.equal(residual[live:], before[live:])
    assert error(found[:live], reference.rms_norm(expected, weight, 1e-6)) < tolerance
    if keeps:
        assert torch.equal(kept[:live, SIZE.hidden :], residual[:live])
        kept[:live, SIZE.hidden :] = -1.0
    assert bool((kept == -1.0).all())
