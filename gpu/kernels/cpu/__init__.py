"""A CPU's kernels: the functions of `step.c` over tensors, compiled on the machine that runs them."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from gpu.kernels.cpu.build import library

WIDTH, TURNED, INPUTS = 8, 16, 16
"""The width of a row, the rotated part of a head, and the inputs of a product are multiples of these."""

GROUP = 16
"""The most query heads of a KV head."""

TILE = 16
"""Outputs of a product whose weights lie together."""

PIECE = 2**20
"""Weights that are interleaved at once, or words of them."""

_TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_long, "f": ctypes.c_float}


class Heads(NamedTuple):
    """How many heads queries and keys have, and how many numbers a head has."""

    queries: int
    keys: int
    dim: int


class DecodeRows(NamedTuple):
    """Decode rows of a step, a token each: `page_table` int32 [slots, pages], `slots` and `lengths`, the keys
    that the token sees, int32 [rows or more]."""

    rows: int
    page_table: Tensor
    page_size: int
    slots: Tensor
    lengths: Tensor


class Scores(NamedTuple):
    """Sliding window of a layer in keys, 0 for none, and the softmax scale."""

    window: int
    scale: float


class Weight(NamedTuple):
    """A weight for `Kernels.multiply`, with its number of `outputs`. Of 8 bits: `numbers` are pairs of inputs
    as int16, rearranged by `interleave`, and `scale` is float32 [outputs]. Of 4 bits: `numbers` int32 and
    `scale` (float16, viewed as int16) are those of `gpu.quant.q4`, both rearranged by `interleave`."""

    numbers: Tensor
    scale: Tensor
    outputs: int

    @property
    def bits(self) -> int:
        return 4 if self.numbers.dtype == torch.int32 else 8


class Kernels:
    """All tensors are float32 and contiguous where a method says nothing else, and nothing is checked. Owner:
    launch thread. The threads of a large operation are torch's."""

    def __init__(self, functions: ctypes.CDLL) -> None:
        functions.set_threads(torch.get_num_threads())
        self._functions = functions
        for name, types in (
            ("rms_norm", "pppfplpll"),
            ("silu_mul", "ppll"),
            ("store_kv", "pllllppppfppl"),
            ("attend", "plpplllpllppllf"),
            ("multiply", "lpppppplll"),
        ):
            function = getattr(functions, name)
            function.argtypes, function.restype = [_TYPES[each] for each in types], None

    def rms_norm(
        self, part: Tensor | None, residual: Tensor, weight: Tensor, eps: float, keep: Tensor | None = None
    ) -> Tensor:
        """See `Ops.add_rms_norm`; the rows of `keep` may be strided."""
        rows, width = residual.shape
        out = torch.empty_like(residual)
        self._functions.rms_norm(
            residual.data_ptr(),
            None if part is None else part.data_ptr(),
            weight.data_ptr(),
            eps,
            None if keep is None else keep.data_ptr(),
            0 if keep is None else keep.stride(0),
            out.data_ptr(),
            rows,
            width,
        )
        return out

    def silu_mul(self, both: Tensor) -> Tensor:
        """silu(first half) · second half of [n, 2 * width]: [n, width]."""
        rows, width = both.shape[0], both.shape[1] // 2
        out = torch.empty(rows, width)
        self._functions.silu_mul(both.data_ptr(), out.data_ptr(), rows, width)
        return out

    def store_kv(
        self,
        qkv: Tensor,
        heads: Heads,
        rotation: tuple[Tensor, Tensor],
        norms: tuple[Tensor, Tensor, float] | None,
        pool: Tensor,
        places: Tensor,
    ) -> None:
        """Norm and rotate queries and keys of `qkv` [n, (queries + 2 * keys) * dim] in place, as `Ops.attend`
        does, and store keys and values in `pool` [tokens, 2 * keys * dim] at `places` int32 [n]."""
        cos, sin = rotation
        q_weight, k_weight, eps = (None, None, 0.0) if norms is None else norms
        self._functions.store_kv(
            qkv.data_ptr(),
            *heads,
            cos.shape[-1],
            cos.data_ptr(),
            sin.data_ptr(),
            None if q_weight is None else q_weight.data_ptr(),
            None if k_weight is None else k_weight.data_ptr(),
            eps,
            pool.data_ptr(),
            places.data_ptr(),
            qkv.shape[0],
        )

    def attend(
        self, q: Tensor, heads: Heads, pool: Tensor, decode: DecodeRows, out: Tensor, scores: Scores
    ) -> None:
        """Compute decode attention for the first rows of `q` [n, queries, dim] into `out` [n, queries * dim].
        A token of `q` is contiguous, `pool` as in `store_kv`."""
        rows, table, size, slots, lengths = decode
        self._functions.attend(
            q.data_ptr(),
            q.stride(0),
            out.data_ptr(),
            pool.data_ptr(),
            *heads,
            table.data_ptr(),
            table.stride(0),
            size,
            slots.data_ptr(),
            lengths.data_ptr(),
            rows,
            *scores,
        )

    def multiply(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        """x Wᵀ + b of `x` [n, inputs]: [n, outputs]."""
        numbers, scale, outputs = weight
        rows, inputs = x.shape
        out = torch.empty(rows, outputs)
        space = torch.empty(rows * (inputs + 2 + inputs // 16), dtype=torch.int16)
        self._functions.multiply(
            weight.bits,
            x.data_ptr(),
            numbers.data_ptr(),
            scale.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            space.data_ptr(),
            rows,
            inputs,
            outputs,
        )
        return out


def interleave(units: Tensor) -> Tensor:
    """Rearrange `units` [outputs, n] to [outputs / TILE, n * TILE]: first the first units of TILE outputs,
    then their second ones, and so on. Missing outputs of the last tile are zeros. In place where TILE divides
    the outputs."""
    outputs, n = units.shape
    if outputs % TILE:
        units = torch.nn.functional.pad(units, (0, 0, 0, -outputs % TILE))
    tiles = units.view(-1, n * TILE)
    for some in torch.split(tiles, max(PIECE // (n * TILE), 1)):
        turned = some.view(-1, TILE, n).transpose(1, 2).contiguous()
        some.copy_(turned.view_as(some))
    return tiles


def kernels() -> Kernels | None:
    """This machine's kernels, for as many threads as torch has now, or None. The first call may run a
    compiler."""
    functions = library()
    return None if functions is None else Kernels(functions)
