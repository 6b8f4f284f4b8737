"""What a grouped GEMM multiplies, and how it is cut."""

from __future__ import annotations

from typing import NamedTuple

from gpu.experts import Packed


class TileConfig(NamedTuple):
    """How one grouped GEMM is cut. `block_n` is the width of the output; `gate_up` reads twice that. 16 rows
    are the least that a tensor core takes, at half the height too."""

    block_n: int
    block_k: int
    warps: int
    stages: int
    swap: bool
    half: bool = False
    tma: bool = False


class GemmShape(NamedTuple):
    """Constants of a grouped GEMM: `n` outputs of `k` inputs.

    gated     `gate_up`: gate and up of `n` outputs each, of which silu(gate) · up is stored; else `down`
    by_block  e4m3 with scales by groups and blocks
    packed    what weights of 4 bits are
    span      of weights of 4 bits: how far the numbers of a word are apart (`gpu.quant.int4`)
    group     of integers of 4 bits: inputs that share a scale and a zero point
    alpha, limit  of a clamped gate (`ClampedGate`); 0: it is silu
    """

    n: int
    k: int
    top_k: int
    gated: bool
    by_block: bool
    alpha: float = 0.0
    limit: float = 0.0
    packed: Packed = ""
    span: int = 0
    group: int = 0
