"""Random inputs of the kernels, as in a step. Shared by checks, timings and tests."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpu.experts import Experts
from gpu.kernels.attention import pages as pages_of
from gpu.kernels.attention import prefill_plan
from gpu.kernels.moe.fused import fused_moe
from gpu.kernels.moe.tuned import MoeConfig
from gpu.kernels.sampling.sample import choose
from gpu.lora import LoraExperts
from gpu.quant import int4
from gpu.sample.rows import Rows
from gpu.state.tables import SlotTables

LINEARS = {
    "30B-A3B qkv": (5120, 2048, False),
    "30B-A3B o": (2048, 4096, False),
    "30B-A3B router": (128, 2048, False),
    "8B qkv": (6144, 4096, False),
    "8B o": (4096, 4096, False),
    "8B gate_up": (24_576, 4096, True),
    "8B down": (4096, 12_288, False),
}
"""Outputs, inputs and whether gated, of the GEMMs of Qwen3-30B-A3B and Qwen3-8B."""


class MoeInputs(NamedTuple):
    """Inputs of an MoE layer: x [T, hidden], logits [T, experts], w13 and w2 of `fused_moe`."""

    x: Tensor
    logits: Tensor
    w13: Tensor
    w2: Tensor


class MoeSize(NamedTuple):
    """Qwen3-30B-A3B by default. `width` is divided by the tensor-parallel ranks."""

    experts: int = 128
    width: int = 768
    hidden: int = 2048
    top_k: int = 8


class Heads(NamedTuple):
    """Query heads, KV heads, head_dim; Qwen3-30B-A3B by default."""

    q: int = 32
    kv: int = 4
    dim: int = 128


class Pages(NamedTuple):
    """KV pages of a layer, page table, slots of the rows, and lengths by slot. k, v [tokens, kv_heads, dim]
    are views of one allocation."""

    k: Tensor
    v: Tensor
    table: Tensor
    slots: Tensor
    lengths: Tensor

    def layer(self, page_size: int, scale: float, cap: float = 0.0) -> pages_of.Pages:
        """The argument of the kernels."""
        return pages_of.Pages(self.k, self.v, self.table, page_size, scale, cap)


def moe_weights(size: MoeSize, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """w13 and w2, normal with standard deviation width**-0.5, so that outputs have the magnitude of the
    inputs."""
    shapes = ((size.experts, 2 * size.width, size.hidden), (size.experts, size.hidden, size.width))
    w13, w2 = (torch.empty(shape, dtype=dtype, device=device).normal_() for shape in shapes)
    return w13.mul_(size.hidden**-0.5), w2.mul_(size.width**-0.5)


def moe_int4(weight: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Experts' matrices `weight` [experts, outputs, inputs] in 4 bits: words and scales, in `dtype`, as
    `Experts` has them, and the weights that these stand for."""
    experts, outputs, inputs = weight.shape
    apart = int4.span(inputs, group)
    words = torch.empty(experts, outputs, inputs // int4.WORD, dtype=torch.int16, device=weight.device)
    scale = torch.empty(experts, inputs // group, outputs, 2, dtype=dtype, device=weight.device)
    plain = torch.empty_like(weight)
    for expert, each in enumerate(weight):
        numbers, by = int4.quantise(each, group)
        words[expert], scale[expert] = int4.pack(numbers, apart), by
        plain[expert] = int4.restore(words[expert], scale[expert])
    return words, scale, plain


def moe_inputs(tokens: int, size: MoeSize, dtype: torch.dtype, device: torch.device) -> MoeInputs:
    """Inputs with uniform routing: every expert is equally likely."""
    x = torch.randn(tokens, size.hidden, device=device).to(dtype)
    logits = torch.randn(tokens, size.experts, device=device)
    return MoeInputs(x, logits, *moe_weights(size, dtype, device))


def linear(rows: int, outputs: int, inputs: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """x [rows, inputs], W [outputs, inputs] and b; outputs have the magnitude of the inputs."""
    made = (torch.randn(rows, inputs), torch.randn(outputs, inputs) * inputs**-0.5, torch.randn(outputs))
    return [each.to(device, dtype) for each in made]


def distinct_experts(tokens: int, size: MoeSize) -> float:
    """Expected number of distinct experts with uniform routing."""
    return size.experts * (1 - (1 - size.top_k / size.experts) ** tokens)


def pages(
    lengths: list[int], page_size: int, heads: Heads, dtype: torch.dtype, device: torch.device
) -> Pages:
    """Pages of rows with `lengths`, allocated in random order from page 1 on, slots in random order.

    Page 0 and everything beyond a length is NaN, so that reads of it show in the output.
    """
    counts = [-(-length // page_size) for length in lengths]
    total, longest = sum(counts) + 1, max([*counts, 1])
    data = torch.empty(total * page_size, 2, heads.kv, heads.dim, dtype=dtype, device=device).normal_()
    data[:page_size] = float("nan")
    order = (torch.randperm(total - 1) + 1).to(torch.int32)
    slots = torch.randperm(len(lengths)) + 1
    table = torch.full((len(lengths) + 1, longest), total - 1, dtype=torch.int32)
    by_slot = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    first = 0
    for slot, length, count in zip(slots.tolist(), lengths, counts, strict=True):
        own = order[first : first + count]
        table[slot, :count] = own
        by_slot[slot] = length
        if length % page_size:
            tail = int(own[-1]) * page_size
            data[tail + length % page_size : tail + page_size] = float("nan")
        first += count
    k, v = data.unbind(1)
    return Pages(k, v, table.to(device), slots.to(device), by_slot.to(device))


class Chunks(NamedTuple):
    """Prefill chunks of a step after `lead` decode rows: int32 slots and starts [C], firsts [C + 1]. `true`
    has (first row, start, tokens) of each as Python numbers; the last of the C is padding."""

    slots: Tensor
    starts: Tensor
    firsts: Tensor
    true: list[tuple[int, int, int]]

    def step(self, count: int) -> prefill_plan.Chunks:
        """The argument of the kernels, with the first `count` chunks valid."""
        return prefill_plan.Chunks(*self[:3], scalar(count, self.slots.device))


def chunks(sizes: list[tuple[int, int]], kept: Pages, lead: int, device: torch.device) -> Chunks:
    """Chunks of (start, tokens) pairs; chunk i belongs to row i of `kept`."""
    true, first = [], lead
    for start, tokens in sizes:
        true.append((first, start, tokens))
        first += tokens
    firsts = [at for at, _, _ in true] + [first, -1000]  # after the valid ones: arbitrary
    slots = [*kept.slots[: len(sizes)].tolist(), 0]
    ints = ([*slots], [start for start, _ in sizes] + [0], firsts)
    tables = [torch.tensor(each, dtype=torch.int32, device=device) for each in ints]
    return Chunks(tables[0], tables[1], tables[2], true)


def rope(tokens: int, rotary: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [tokens, 1, rotary] of random positions; the first half of sin is negated."""
    positions = torch.randint(0, 30_000, (tokens,), device=device)
    steps = torch.arange(0, rotary, 2, device=device) / rotary
    angles = positions[:, None] * 1e6**-steps
    cos, sin = angles.cos(), angles.sin()
    both = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    return both[0].to(dtype).unsqueeze(1), both[1].to(dtype).unsqueeze(1)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor for kernels that are compiled only: of it their types, sizes and alignment matter."""
    return torch.empty(shape, dtype=dtype)


def scalar(value: int, device: torch.device) -> Tensor:
    """An int32 tensor [1] on `device`."""
    return torch.tensor([value], dtype=torch.int32, device=device)


def error(found: Tensor, expected: Tensor) -> float:
    """‖found - expected‖ / ‖expected‖ in float64; infinite if `found` is not finite."""
    a, b = found.double(), expected.double()
    if not bool(a.isfinite().all()):
        return float("inf")
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def moe_after(x: Tensor) -> tuple[Tensor, Tensor, float]:
    """`after` of `fused_moe` for `x` [T, hidden]: a residual of zeros, to which the output is
    added."""
    return torch.zeros_like(x), x.new_ones(x.shape[1]), 1e-6


def run_moe(
    x: Tensor,
    logits: Tensor,
    weights: tuple[Tensor, Tensor],
    top_k: int,
    config: MoeConfig,
    scales: tuple[Tensor, Tensor] | None = None,
    lora: LoraExperts | None = None,
    **options: Any,
) -> Tensor:
    """The MoE output of `fused_moe`: [T, hidden]; zeros in padding rows."""
    after = moe_after(x)
    experts = Experts(*weights, top_k, scales=scales, lora=lora or LoraExperts())
    fused_moe(x, logits, experts, config, after, **options)
    return after[0]


def sampling_rows(slots: Tensor, positions: Tensor, live: int | None = None, **columns: Tensor) -> Rows:
    """Rows of `slots` and `positions` integer [n], of which the first `live` (default: all) are valid, with
    `columns` [any] in the tables from slot 0 on."""
    count, device = len(slots), slots.device
    tables = SlotTables(max(count, *(len(column) for column in columns.values())), 1, device)
    for name, column in columns.items():
        getattr(tables, name)[: len(column)] = column
    return Rows(slots.int(), positions.int(), scalar(count if live is None else live, device), tables)


def choose_tokens(logits: Tensor, rows: Rows, *, filtered: bool = False, pdl: bool = False) -> Tensor:
    """Token ids int64 [n] of `choose`."""
    tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    choose(logits, rows, tokens, filtered=filtered, pdl=pdl)
    return tokens
