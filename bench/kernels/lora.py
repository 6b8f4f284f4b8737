"""Times of adapters' kernels: `python -m bench.kernels.lora`.

Written to bench/results/lora-kernels.json: of every matrix of Qwen3-8B and Qwen3-30B-A3B, at several rows and
adapters of rank 16 (rows take them in turn), the microseconds of `shrink` and of `expand` alone, of the base
product behind its norm, and of what that takes with adapters, one kernel behind the other, with `shrink` on a
branch of its own and with `expand` in the product's epilogue; of an expert layer, without and with adapters;
and of the work lists. `bound` is the time for the bytes at 4.0 TB/s: the base weights that are read, A and B
of every adapter, of experts' those of every adapter and expert that meet, and rows where they count. All over
several matrices that together exceed the L2 cache.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.kernels.inputs import MoeSize, moe_after, moe_inputs, moe_weights
from bench.kernels.lora_inputs import blank_rows, lora_matrix, lora_rows, slots_view
from bench.kernels.timing import Row, microseconds
from bench.results import save
from gpu.device import HOPPER
from gpu.experts import Experts
from gpu.kernels.gemm.delta import fits
from gpu.kernels.gemm.gemv import gemv, gemv_config
from gpu.kernels.gemm.skinny import skinny_config, skinny_gemm, split_k_counters
from gpu.kernels.lora.dense import expand, expand_silu, shrink
from gpu.kernels.lora.linear import Branch, lora_gated, lora_linear, shrink_ahead
from gpu.kernels.lora_rows import lay_out
from gpu.kernels.moe.fused import fused_moe
from gpu.kernels.moe.tuned import MoeConfig, MoeConfigs, MoeShape
from gpu.kernels.norm import rms_norm
from gpu.kernels.silu_mul import silu_mul
from gpu.lora import LoraExperts, LoraMatrix, LoraRows
from gpu.ops.fused import cublas_gemm

RATE = 4.0e12
"""Bytes per second that weights are read with."""

ROWS, ADAPTERS, RANK = (1, 32, 128, 256), (1, 8), 16

Time = Callable[[Sequence[Callable[[], Any]]], float]
"""Microseconds per call."""


class Linear(NamedTuple):
    """A matrix: output sizes of its parts, and inputs. With two parts silu follows."""

    parts: tuple[int, ...]
    inputs: int


LINEARS = {
    "8B qkv": Linear((4096, 1024, 1024), 4096),
    "8B o": Linear((4096,), 4096),
    "8B gate_up": Linear((12_288, 12_288), 4096),
    "8B down": Linear((4096,), 12_288),
    "8B head": Linear((151_936,), 4096),
    "30B-A3B qkv": Linear((4096, 512, 512), 2048),
    "30B-A3B o": Linear((2048,), 4096),
}


class Where(NamedTuple):
    """Device, dtype and timer of the measurements. `cold` bytes are more than the L2 cache holds."""

    device: torch.device
    dtype: torch.dtype
    pdl: bool
    time: Time
    cold: float = 150e6


def lora_line(name: str, case: str, us: float, moved: float) -> Row:
    """A row of the table with its bound."""
    return Row(name, case, us, moved, target=f"bound {1e6 * moved / RATE:.1f} us")


class _Base:
    """Calls of one base product behind its norm, each with its own weights, without and with adapters."""

    def __init__(self, linear: Linear, n: int, where: Where) -> None:
        outputs, inputs = sum(linear.parts), linear.inputs
        weight = torch.randn(outputs, inputs, device=where.device) * inputs**-0.5
        copies = max(2, int(where.cold / (weight.numel() * where.dtype.itemsize)) + 1)
        self.gated, self.pdl = len(linear.parts) == 2, where.pdl
        self._weights = [weight.to(where.dtype, copy=True) for _ in range(copies)]
        self._x = torch.randn(n, inputs, device=where.device).to(where.dtype)
        self._residual, self._scale = torch.zeros_like(self._x), self._x.new_ones(inputs)
        self._counters = split_k_counters(where.device)
        few = gemv_config(n, weight, self.gated) is not None or not self.pdl
        self.cut = None if few else skinny_config(n, self._weights[0], self.gated)

    def __len__(self) -> int:
        return len(self._weights)

    def _norm(self) -> Tensor:
        return rms_norm(self._x, self._scale, 1e-6, residual=self._residual, pdl=self.pdl)

    def _product(self, x: Tensor, at: int, gated: bool) -> Tensor:
        """Product as `TritonOps` computes it."""
        weight, pdl = self._weights[at], self.pdl
        if (few := gemv_config(len(x), weight, gated)) is not None:
            return gemv(x, weight, None, few, gated=gated, pdl=pdl)
        if pdl and (skinny := skinny_config(len(x), weight, gated)) is not None:
            return skinny_gemm(x, weight, None, skinny, self._counters, gated=gated, pdl=pdl)
        y = cublas_gemm(x, weight, None)
        return silu_mul(y, pdl=pdl) if gated else y

    def plain(self, at: int) -> Tensor:
        """The product without adapters."""
        return self._product(self._norm(), at, self.gated)

    def in_epilogue(self, at: int, lora: LoraMatrix, rows: LoraRows) -> Tensor:
        """The product with adapters, which its own kernel adds: that of `cut`."""
        assert self.cut is not None
        x, pdl = self._norm(), self.pdl
        delta, weight = shrink_ahead(x, lora, rows, pdl=pdl), self._weights[at]
        return skinny_gemm(x, weight, None, self.cut, self._counters, gated=self.gated, delta=delta, pdl=pdl)

    def adapted(self, at: int, lora: LoraMatrix, rows: LoraRows, branch: Branch | None) -> Tensor:
        """The product with adapters."""
        x = self._norm()
        call = lora_gated if self.gated else lora_linear
        return call(x, lora, rows, branch, lambda: self._product(x, at, False), pdl=self.pdl)


def linears(name: str, linear: Linear, n: int, adapters: int, where: Where) -> Iterator[Row]:
    """Times of one matrix at `n` rows of `adapters` adapters."""
    device, dtype, pdl = where.device, where.dtype, where.pdl
    outputs, wide = sum(linear.parts), len(linear.parts) * RANK
    size, bytes_a, bytes_b = dtype.itemsize, linear.inputs * wide, outputs * RANK
    used = min(adapters, n)
    moved = float(used * (bytes_a + bytes_b) * size)
    copies = min(max(2, int(where.cold / moved) + 1), 200)
    made = [lora_matrix([RANK] * adapters, linear.inputs, linear.parts, dtype, device) for _ in range(copies)]
    rows = lora_rows([row % adapters for row in range(n)], adapters, device)
    x = torch.randn(n, linear.inputs, device=device).to(dtype)
    y = torch.zeros(n, outputs, device=device, dtype=dtype)
    found = [shrink(x, lora, rows) for lora in made]
    case = f"{name} x {n}, {adapters} adapters"
    us = where.time([partial(shrink, x, lora, rows, pdl=pdl) for lora in made])
    yield lora_line("shrink", case, us, float(used * bytes_a * size + x.nbytes))
    last = expand_silu if len(linear.parts) == 2 else expand
    us = where.time([partial(last, h, lora, rows, y, pdl=pdl) for h, lora in zip(found, made, strict=True)])
    written = 1.5 if last is expand_silu else 2
    yield lora_line(last.__name__, case, us, float(used * bytes_b * size + written * y.nbytes))
    base = _Base(linear, n, where)
    plain = where.time([partial(base.plain, at) for at in range(len(base))])
    weights = float(outputs * linear.inputs * size)
    yield lora_line("norm, product", case, plain, weights)
    turns = [(at % len(base), made[at % copies]) for at in range(max(len(base), min(copies, 16)))]
    for kind, branch in (("one after another", None), ("branch", Branch(device))):
        us = where.time([partial(base.adapted, at, lora, rows, branch) for at, lora in turns])
        line = lora_line(f"  lora, {kind}", case, us, weights + moved)
        yield line._replace(target=f"{line.target}, +{us - plain:.1f} us")
    if base.cut is not None and fits(made[0], base.cut.block_n):
        us = where.time([partial(base.in_epilogue, at, lora, rows) for at, lora in turns])
        line = lora_line("  lora, epilogue", case, us, weights + moved)
        yield line._replace(target=f"{line.target}, +{us - plain:.1f} us")


def experts(
    size: MoeSize, n: int, adapters: int, where: Where, config: MoeConfig | None = None
) -> Iterator[Row]:
    """An expert layer, from logits to norm, and `config` or the one that a step has."""
    device, dtype = where.device, where.dtype
    name = torch.cuda.get_device_name(0) if device.type == "cuda" else ""
    kind = str(dtype).removeprefix("torch.")
    shape = MoeShape(size.experts, size.width, size.hidden, size.top_k, kind, name)
    use = config or MoeConfigs(shape, deep=where.pdl).at(n)
    weights = moe_weights(size, dtype, device)
    many = (size.experts, size.experts)
    sets = [
        LoraExperts(
            lora_matrix([RANK] * adapters, size.hidden, (size.width,) * 2, dtype, device, experts=many),
            lora_matrix([RANK] * adapters, size.width, (size.hidden,), dtype, device, experts=many),
        )
        for _ in range(2)
    ]
    places = [row % adapters for row in range(n)]
    rows = lora_rows(places, adapters, device)
    steps = [moe_inputs(n, size, dtype, device)[:2] for _ in range(4)]
    met, hit = 0, 0
    for _, logits in steps:
        chosen = logits.topk(size.top_k).indices.tolist()
        met += len({(place, e) for place, row in zip(places, chosen, strict=True) for e in row})
        hit += len({e for row in chosen for e in row})
    a_and_b = RANK * (2 * size.hidden + 2 * size.width + size.width + size.hidden) * dtype.itemsize
    base = 3.0 * size.width * size.hidden * dtype.itemsize * hit / len(steps)
    case = f"experts x {n}, {adapters} adapters"

    def call(x: Tensor, logits: Tensor, lora: LoraExperts | None) -> Callable[[], Tensor]:
        layer = Experts(*weights, size.top_k, lora=lora or LoraExperts())
        used = None if lora is None else rows
        return partial(fused_moe, x, logits, layer, use, moe_after(x), adapters=used, pdl=where.pdl)

    plain = where.time([call(x, logits, None) for x, logits in steps])
    yield lora_line("moe + norm", case, plain, base)
    us = where.time([call(x, logits, sets[at % 2]) for at, (x, logits) in enumerate(steps)])
    line = lora_line("  lora", case, us, base + a_and_b * met / len(steps))
    yield line._replace(target=f"{line.target}, +{us - plain:.1f} us")


def lists(n: int, places: int, where: Where) -> Iterator[Row]:
    """Times of the work lists of a step of `n` tokens, as many of them samples as rows can be."""
    device = where.device
    decode = list(range(min(n, 256)))
    chunks = [(0, n - len(decode))] if n > len(decode) else []
    view = slots_view(decode, chunks, n, 8 if chunks else 0, device)
    place = (torch.arange(256, device=device) % places).int()
    found = blank_rows(n, places, device), blank_rows(len(decode), places, device)
    us = where.time([partial(lay_out, view, view.decode_slots[: len(decode)], place, *found, pdl=where.pdl)])
    yield lora_line("lay_out", f"{n} tokens, {places} places", us, 8.0 * n)


def times(where: Where) -> Iterator[Row]:
    """Times of all kernels and layers."""
    for n in (32, 256, 8192):
        yield from lists(n, 8, where)
    for name, linear in LINEARS.items():
        for n in ROWS:
            for adapters in ADAPTERS:
                yield from linears(name, linear, n, adapters, where)
    for n in ROWS:
        for adapters in ADAPTERS:
            yield from experts(MoeSize(), n, adapters, where)


def main(argv: list[str] | None = None) -> int:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--name", default="lora-kernels")
    args = parser.parse_args(argv)
    pdl = torch.cuda.get_device_capability() == HOPPER
    where = Where(torch.device("cuda"), torch.bfloat16, pdl, partial(microseconds, replays=7))
    found: dict[str, dict[str, dict[str, float]]] = {}
    for line in times(where):
        print(line.line(), flush=True)
        figures = {"us": round(line.us, 2), "bound": round(1e6 * line.bytes / RATE, 2)}
        found.setdefault(line.case, {})[line.name.strip()] = figures
        save(args.name, {"device": torch.cuda.get_device_name(0), "times": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
