"""Tile sizes of the expert GEMMs: what was measured for a shape and device, or a rule without it.

A file of `configs/kernels/` maps token counts to sizes and is written by `bench/kernels/tune.py`. The
entry whose count is nearest by ratio is used; `rule` is for shapes without a file, and for a handful of rows
where the file begins above them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from core.models.quant import BLOCK
from core.models.spec import W8A8, Fp8
from gpu.experts import Packed
from gpu.kernels.gemm.cublaslt import FOLDER
from gpu.kernels.moe.gemm_config import TileConfig
from gpu.kernels.moe.grouped_gemm_tma import TALL
from gpu.quant.scaled import FP8

SMALL_ROWS = 4
"""Rows up to which every row reading its own experts is no dearer than tiles: at 4 rows of Qwen3's
128 experts 29 of 32 are distinct, at 8 only 52 of 64."""


FP8_NAME = str(FP8).removeprefix("torch.")
FP8_BLOCKS_NAME = f"{FP8_NAME}_blocks"

INT8_NAME, MXFP4_NAME, INT4_NAME = "int8", "mxfp4", "int4"


def weight_name(held: Fp8 | W8A8 | Packed, dtype: str) -> str:
    """`MoeShape.dtype` of a model's experts, whose activations are of `dtype`."""
    if isinstance(held, W8A8):
        return INT8_NAME
    return {"rows": FP8_NAME, "blocks": FP8_BLOCKS_NAME, "": dtype}.get(held, held)


TWO_BYTES = ("bfloat16", "float16")


class MoeShape(NamedTuple):
    """What a config depends on. `width` is an expert's on this device: 768, or 384 under TP 2."""

    experts: int
    width: int
    hidden: int
    top_k: int
    dtype: str
    device: str

    @property
    def file(self) -> str:
        """The file's name in `configs/kernels/`."""
        device = self.device.replace(" ", "_")
        return f"moe_e{self.experts}_n{self.width}_h{self.hidden}_k{self.top_k}_{self.dtype}_{device}.json"


class MoeConfig(NamedTuple):
    """How one MoE layer runs at one token count. With `small`, `gpu.kernels.moe.few_rows` takes it and the
    rest is unused."""

    small: bool
    block_m: int
    up: TileConfig
    down: TileConfig


def rule(shape: MoeShape, tokens: int, deep: bool = False) -> MoeConfig:
    """Sizes from the rows an expert gets on average. `deep`: the device has compute capability 9.0 and its
    228 KiB of shared memory."""
    average = tokens * shape.top_k / shape.experts
    # int8 was not measured; where there is less room than on Hopper, tiles of 16 bits leave half of it.
    fp8 = shape.dtype.startswith(FP8_NAME) or (shape.dtype == INT8_NAME and deep)
    if shape.dtype in (MXFP4_NAME, INT4_NAME):
        integers = shape.dtype == INT4_NAME
        return MoeConfig(integers and tokens <= SMALL_ROWS, *_packed_tiles(average, integers))
    return MoeConfig(
        tokens <= SMALL_ROWS, *(_fp8_tiles(shape, average) if fp8 else _tiles(shape, average, deep))
    )


def _tiles(shape: MoeShape, average: float, deep: bool) -> tuple[int, TileConfig, TileConfig]:
    """Fill the 64 rows of the tensor cores' left side with weights until the tokens themselves fill it.
    Reasoned, not measured, but for `deep`: there rows in tall tiles are the faster."""
    if average <= 12:
        return 16, TileConfig(64, 128, 4, 3, True), TileConfig(64, 128, 4, 3, True)
    if average <= 24:
        return 32, TileConfig(64, 64, 4, 4, True), TileConfig(64, 64, 4, 4, True)
    if average <= 64:
        return 64, TileConfig(64, 64, 4, 4, True), TileConfig(128, 64, 4, 4, True)
    if deep and shape.dtype in TWO_BYTES and not (shape.width % 8 or shape.hidden % 8):
        return TALL, TileConfig(128, 64, 8, 4, False, tma=True), TileConfig(256, 64, 8, 4, False, tma=True)
    return 128, TileConfig(128, 64, 8, 3, False, True), TileConfig(256, 64, 8, 3, False, True)


def _fp8_tiles(shape: MoeShape, average: float) -> tuple[int, TileConfig, TileConfig]:
    """Likewise in FP8, measured on an H200 at 128 experts of 768, the best of 10 to 16 cuts. A step over K is
    one block of scales. Scaled by blocks a step's sums need registers beside those of all steps: tiles stay
    low, 553 us for both products at 4,096 tokens where tiles of 128 rows take 574; by rows 507 and 473."""
    blocks = shape.dtype == FP8_BLOCKS_NAME
    if average <= 12:
        return 16, TileConfig(64, BLOCK, 4, 4, True), TileConfig(64, BLOCK, 4, 3, True, tma=True)
    if average <= 24:
        return 32, TileConfig(128, BLOCK, 8, 3, True, tma=True), TileConfig(64, BLOCK, 4, 3, True)
    down = TileConfig(128, BLOCK, 4, 3, False, tma=True)
    if average <= (64 if blocks else 48):
        return 64, TileConfig(128, BLOCK, 8, 4, True, True, True), down
    if blocks:
        return 64, TileConfig(128, BLOCK, 8, 4, False, tma=True), down
    return 128, TileConfig(128, BLOCK, 8, 3, True, True, True), down._replace(half=True)


def _packed_tiles(average: float, integers: bool) -> tuple[int, TileConfig, TileConfig]:
    """Like `_tiles`, not measured either. Numbers are turned into 16 bits in registers: no descriptor loads
    them, and tiles of many rows are no wider than the registers hold. A step over K takes 128 inputs of
    MXFP4, but 256 of `integers`, of which fewer fit into shared memory at once."""
    few, many = TileConfig(64, 64, 4, 4 - integers, True), TileConfig(128, 64, 8, 3 - integers, True, True)
    if average <= 64:
        return 16 if average <= 12 else 32 if average <= 24 else 64, few, few
    return 128, many, many


def parse(entry: Mapping[str, Any]) -> MoeConfig:
    """A JSON entry. Raises KeyError or TypeError where a field is missing or unknown."""
    return MoeConfig(entry["small"], entry["block_m"], TileConfig(**entry["up"]), TileConfig(**entry["down"]))


def nearest(table: Mapping[int, MoeConfig], tokens: int) -> MoeConfig:
    """The entry whose token count is nearest by ratio; the smaller one on a tie."""
    return table[min(sorted(table), key=lambda n: abs(math.log(n / max(tokens, 1))))]


class MoeConfigs:
    """The configs of one shape, the file read once, at construction.

    Owner: launch thread, once built.
    """

    def __init__(self, shape: MoeShape, folder: Path = FOLDER, *, deep: bool = False) -> None:
        self._shape = shape
        self._deep = deep
        path = folder / shape.file
        self._table: dict[int, MoeConfig] = {}
        if path.exists():
            entries = json.loads(path.read_text())
            self._table = {int(n): parse(entry) for n, entry in entries.items()}
        self.source = str(path) if self._table else "rule"

    def at(self, tokens: int) -> MoeConfig:
        """The config for a step of `tokens` rows, padding counted. A file that begins above the few rows of
        `few_rows_moe` says nothing about them."""
        if not self._table or tokens <= SMALL_ROWS < min(self._table):
            return rule(self._shape, tokens, self._deep)
        return nearest(self._table, tokens)
