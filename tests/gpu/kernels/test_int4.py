"""Products of 4-bit weights against those of the weights that they stand for."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from bench.kernels.inputs import LINEARS, error
from bench.kernels.int4 import cuts
from gpu.kernels.gemm.int4 import MOST_ROWS, Int4Config, int4_config, int4_gemm, int4_restore
from gpu.kernels.gemm.int4_gemv import Int4GemvConfig, int4_gemv, int4_gemv_config
from gpu.kernels.gemm.skinny import COUNTERS, split_k_counters
from gpu.quant.int4 import pack, quantise, restore, span


def packed(outputs: int, inputs: int, group: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """A matrix as it lies in memory: words, scales and the bias."""
    numbers, scale = quantise(torch.randn(outputs, inputs, device=device) * inputs**-0.5, group)
    words = pack(numbers, span(inputs, group))
    return [words, scale.to(dtype), torch.randn(outputs, device=device).to(dtype)]


# (rows, outputs, inputs, group, cut): every size of group and one for all inputs; numbers of a word 32 and 64
# apart; outputs that a tile does not divide; K in one part and in several; sums that are
# scaled (up to 16 rows) and weights; more rows than one program has
CASES = [
    (1, 40, 256, 64, Int4Config(32, 1, 2, 3)),
    (1, 32, 512, 128, Int4Config(32, 2, 2, 3)),
    (3, 32, 256, 32, Int4Config(32, 2, 2, 3)),
    (9, 70, 512, 512, Int4Config(32, 2, 2, 3)),
    (20, 64, 256, 128, Int4Config(64, 1, 4, 3)),
    (33, 130, 384, 32, Int4Config(128, 3, 8, 3)),
    (70, 64, 512, 64, Int4Config(64, 2, 4, 3)),
]


@pytest.mark.parametrize(("rows", "outputs", "inputs", "group", "cut"), CASES)
@pytest.mark.parametrize("gated", [False, True])
def test_as_the_weights_they_stand_for(
    rows: int,
    outputs: int,
    inputs: int,
    group: int,
    cut: Int4Config,
    gated: bool,
    device: torch.device,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    words, scale, bias = packed(outputs * (1 + gated), inputs, group, device, dtype)
    x = torch.randn(rows, inputs, device=device).to(dtype)
    counters = split_k_counters(device)
    want = F.linear(x.double(), restore(words, scale).double(), bias.double())
    if gated:
        gate, up = want.chunk(2, dim=1)
        want = F.silu(gate) * up
    found = int4_gemm(x, words, scale, bias, cut, counters, gated=gated)
    assert found.dtype == dtype
    assert error(found, want) < tolerance
    assert not counters.any()  # as the next product wants them


@pytest.mark.parametrize(("outputs", "inputs", "group"), [(70, 512, 64), (64, 384, 32), (64, 256, 256)])
def test_weights_in_16_bits(
    outputs: int, inputs: int, group: int, device: torch.device, dtype: torch.dtype, tolerance: float
) -> None:
    words, scale, _ = packed(outputs, inputs, group, device, dtype)
    found = int4_restore(words, scale)
    assert found.dtype == dtype
    assert error(found, restore(words, scale)) < tolerance


@pytest.mark.parametrize("rows", [1, 8, 16, 32, 64, 256])
@pytest.mark.parametrize("name", ["8B qkv", "8B o", "8B gate_up", "8B down"])
def test_a_cut_fits_what_it_cuts(name: str, rows: int) -> None:
    """The parts of K are equally long, there are counters for all tiles, and programs fill a device."""
    outputs, inputs, gated = LINEARS[name]
    words = torch.empty(outputs, inputs // 4, dtype=torch.int16)
    scale = torch.empty(inputs // 128, outputs, 2)
    cut = int4_config(rows, words, scale, gated)
    assert cut is not None
    tiles = -(-outputs // (1 + gated) // cut.block_n) * -(-rows // 64)
    assert inputs // (4 * span(inputs, 128)) % cut.split == 0
    assert tiles <= COUNTERS and tiles * cut.split >= 90
    assert int4_config(MOST_ROWS + 1, words, scale, gated) is None


@pytest.fixture
def instructions(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the instructions that the interpreter does not run by Triton's own operations."""

    def run(asm: Any, _: str, words: Any, *, dtype: Any, **__: object) -> Any:
        text = getattr(asm, "value", asm)
        base = int(found[1], 16) if (found := re.search(r"mov\.b32 base, (0x\w+);", text)) else 0
        if chosen := re.fullmatch(r"prmt\.b32 \$0, \$1, \$2, 0x(\w{4});", text):
            places = [divmod(int(digit), 4) for digit in reversed(chosen[1])]
            picked = [((words[word] >> 8 * byte) & 255) << 8 * to for to, (word, byte) in enumerate(places)]
            return picked[0] | picked[1] | picked[2] | picked[3]
        if half := re.fullmatch(r"dp2a\.(lo|hi)\.s32\.u32 \$0, \$1, \$2, \$3;", text):
            x, numbers, total = words
            numbers = numbers >> 16 if half[1] == "hi" else numbers
            return ((x << 16) >> 16) * (numbers & 255) + (x >> 16) * ((numbers >> 8) & 255) + total
        shift = int(re.search(r"shr\.b32 t, \$1, (\d+);", text)[1])  # type: ignore[index]
        assert "lop3.b32 t, t, 0x000f000f, base, 0xea;" in text
        return (((words[0] >> shift) & 15) | (base & 0xFFFF)).to(tl.int16).to(dtype, bitcast=True)

    if device.type == "cpu":
        monkeypatch.setattr(tl, "inline_asm_elementwise", run)


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.usefixtures("instructions")
def test_float16(rows: int, device: torch.device) -> None:
    """Scale and zero point come as one number of 32 bits, and numbers as those of a mantissa."""
    words, scale, bias = packed(64, 256, 32, device, torch.float16)
    x = torch.randn(rows, 256, device=device).half()
    cut = Int4Config(64, 2, 4, 3)
    found = int4_gemm(x, words, scale, bias, cut, split_k_counters(device))
    want = F.linear(x.double(), restore(words, scale).double(), bias.double())
    assert error(found, want) < 2e-3
    assert error(int4_restore(words, scale), restore(words, scale)) < 1e-3


@pytest.mark.parametrize(("base", "kind"), [(0x4300, torch.bfloat16), (0x6400, torch.float16)])
def test_numbers_in_a_mantissa(base: int, kind: torch.dtype) -> None:
    """The kernels' instructions rely on this, and the interpreter does not run them."""
    numbers = torch.arange(16, dtype=torch.int16)
    found = (numbers | base).view(kind)
    assert torch.equal(found.float(), numbers.float() + (128 if kind == torch.bfloat16 else 1024))


# (outputs, inputs, group, cut). The cases have every group size and one group for all inputs, spans of 32 and
# 64, outputs that the columns of a program do not divide, one round and several rounds with a partial last
# one, and rows of less than one block, of one and of several
ROWS = [
    (40, 256, 64, Int4GemvConfig(4, 4, 0)),
    (7, 512, 128, Int4GemvConfig(2, 4, 0)),
    (19, 640, 32, Int4GemvConfig(4, 4, 2)),
    (12, 4096, 128, Int4GemvConfig(4, 4, 2)),
    (9, 5120, 512, Int4GemvConfig(2, 4, 3)),
    (4, 12288, 128, Int4GemvConfig(4, 4, 0)),
    (10, 5120, 128, Int4GemvConfig(2, 2, 3, 256)),
    (8, 1024, 1024, Int4GemvConfig(1, 2, 3)),
]


@pytest.mark.parametrize(("outputs", "inputs", "group", "cut"), ROWS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("kind", "most"), [(torch.bfloat16, 6e-3), (torch.float16, 8e-4)])
@pytest.mark.usefixtures("instructions")
def test_one_row(
    outputs: int,
    inputs: int,
    group: int,
    cut: Int4GemvConfig,
    gated: bool,
    kind: torch.dtype,
    most: float,
    device: torch.device,
) -> None:
    words, scale, bias = packed(outputs * (1 + gated), inputs, group, device, kind)
    x = torch.randn(1, inputs, device=device).to(kind)
    for added in (bias, None):
        want = F.linear(x.double(), restore(words, scale).double(), None if added is None else added.double())
        if gated:
            gate, up = want.chunk(2, dim=1)
            want = F.silu(gate) * up
        found = int4_gemv(x, words, scale, added, cut, gated=gated)
        assert found.dtype == kind
        assert error(found, want) < most


@pytest.mark.usefixtures("instructions")
def test_one_row_of_large_and_of_small_inputs(device: torch.device) -> None:
    """Each thread scales its own 32 inputs: a large input does not round away the small ones of others."""
    words, scale, _ = packed(24, 1024, 128, device, torch.bfloat16)
    x = torch.randn(1, 1024, device=device).bfloat16()
    x[0, 3], x[0, 512:] = 3e4, x[0, 512:] * 1e-30
    scale[:4] = 0  # so that of the groups before 512 nothing is left
    want = F.linear(x.double(), restore(words, scale).double())
    assert error(int4_gemv(x, words, scale, None, Int4GemvConfig(4, 4, 0)), want) < 6e-3


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.usefixtures("instructions")
def test_one_row_gone_wrong_is_not_a_number(bad: float, device: torch.device) -> None:
    words, scale, bias = packed(8, 512, 128, device, torch.bfloat16)
    x = torch.zeros(1, 512, device=device, dtype=torch.bfloat16)
    cut = Int4GemvConfig(4, 4, 0)
    assert torch.equal(int4_gemv(x, words, scale, bias, cut)[0], bias)
    x[0, 300] = bad
    assert not int4_gemv(x, words, scale, bias, cut).isfinite().any()


@pytest.mark.parametrize("name", ["8B o", "8B gate_up"])
def test_cuts_of_one_row_that_are_timed_run(name: str) -> None:
    """`python -m bench.kernels.int4 --cuts`: the cut that is served comes first."""
    outputs, inputs, gated = LINEARS[name]
    words, scale = (
        torch.empty(outputs, inputs // 4, dtype=torch.int16),
        torch.empty(inputs // 128, outputs, 2),
    )
    served, *others = cuts(1, words, scale.bfloat16(), gated)
    assert served == int4_gemv_config(1, words, scale.bfloat16(), gated)
    assert {type(each) for each in others} == {Int4Config, Int4GemvConfig}


def test_a_cut_of_one_row_fits_the_registers() -> None:
    def cut(rows: int, inputs: int, gated: bool, kind: torch.dtype = torch.bfloat16) -> Int4GemvConfig | None:
        words, scale = torch.empty(64, inputs // 4, dtype=torch.int16), torch.empty(inputs // 128, 64, 2)
        return int4_gemv_config(rows, words, scale.to(kind), gated)

    assert cut(2, 4096, gated=False) is None
    assert cut(1, 4096, gated=False, kind=torch.float32) is None
    assert cut(1, 7 * 4096 + 256, gated=False) is None
    assert cut(1, 3 * 4096 + 256, gated=True) is None
    sizes = [(inputs, False) for inputs in (256, 2048, 4096, 5120, 6144, 8192, 14336, 25600, 28672)]
    for inputs, gated in sizes + [(inputs, True) for inputs in (256, 2048, 4096, 5120, 8192, 3 * 4096)]:
        found = cut(1, inputs, gated)
        assert found is not None
        assert (1 + gated) * found.columns * inputs // (32 * found.warps * 8) <= 64  # words of a thread
