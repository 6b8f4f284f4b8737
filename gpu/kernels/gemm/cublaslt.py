"""cuBLASLt with algorithms chosen by measurement.

cuBLAS takes the algorithm that it estimates to be fastest at full clock. A step of thousands of tokens holds
an H200 at its power limit, a quarter below that clock, and there the quickest is the one that takes the
least energy: for Qwen3-8B's four products of 8,192 rows, in turn with cuBLAS's own, 4.66 ms against 4.74.
And at some hundred rows its estimate is off for some shapes: 4,096 outputs of 12,288 inputs at 192 rows
take 51 us by its own choice, 39 by another.
Which ones are better was measured (`bench.kernels.products`) and is listed in `configs/kernels/`; for other
sizes cuBLAS chooses.

Bound with ctypes: torch has no way to name an algorithm, and the interface is a dozen C functions. Numbers
are of cublasLt.h, where they may not change.
"""

from __future__ import annotations

import ctypes
import json
import logging
from collections.abc import Iterator, Mapping
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

FOLDER = Path(__file__).resolve().parents[3] / "configs" / "kernels"
"""Files of measured choices, by device."""


log = logging.getLogger(__name__)

LEAST_ROWS = 4096
"""Rows from which a choice for many rows holds: at fewer the device is short of work, not of power."""

MANY = 0
"""Stands for LEAST_ROWS and more among the row counts that choices are for."""

WORKSPACE = 32 * 2**20
"""Bytes an algorithm may ask for; what cuBLAS grants itself on Hopper."""

FLOAT32, FLOAT32_SUMS, BFLOAT16 = 0, 68, 14
TRANSPOSE_A = 3
"""One of a product's attributes: cuBLAS counts columns first, so that W [outputs, inputs] is its Aᵀ."""
MOST_WORKSPACE = 1
TILE, SPLIT, REDUCTION, SWIZZLE, KIND, CLUSTER = 1, 2, 3, 4, 5, 8
"""An algorithm's attributes, of four bytes each, but for CLUSTER's two. KIND is its "custom option"."""
IN_FLOAT32 = 2
"""How parts of a split product are added."""
ASKED = 16


class _Algorithm(ctypes.Structure):
    _fields_: ClassVar = (("data", c_uint64 * 8),)


class _Found(ctypes.Structure):
    _fields_: ClassVar = (
        ("algorithm", _Algorithm),
        ("workspace", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class Choice(NamedTuple):
    """An algorithm by what sets it apart among those that cuBLASLt proposes, in its own numbers: tile and
    cluster shape, whether neighbouring tiles are computed at the same time, parts of the inputs that are
    summed apart, and which of the kernels with that tile; None: the first."""

    tile: int
    cluster: int
    swizzle: int = 0
    split: int = 1
    kind: int | None = None


Sizes = tuple[int, int, int]
"""Rows, outputs and inputs of a product."""


def choices(device: str, folder: Path = FOLDER) -> dict[Sizes, Choice]:
    """Choices measured on a device for bfloat16, by sizes, with MANY rows where the file names none; empty
    without a file."""
    path = folder / f"dense_bfloat16_{device.replace(' ', '_')}.json"
    if not path.exists():
        return {}
    found: dict[str, dict[str, int]] = json.loads(path.read_text())
    return {sizes_of(name): Choice(**choice) for name, choice in found.items()}


def sizes_of(name: str) -> Sizes:
    """The sizes that an entry of such a file is for."""
    *rows, outputs, inputs = (int(part) for part in name.split("x"))
    return rows[0] if rows else MANY, outputs, inputs


class CublasError(RuntimeError):
    """A call of cuBLASLt failed."""


class Product:
    """x Wᵀ of one shape in bfloat16. Owner: launch thread."""

    def __init__(self, library: Any, handle: c_void_p, space: Tensor, sizes: Sizes) -> None:
        """`space` is WORKSPACE bytes on the device."""
        rows, outputs, inputs = sizes
        self._library, self._handle, self._space = library, handle, space
        self._operation = c_void_p()
        self._call("MatmulDescCreate", byref(self._operation), FLOAT32_SUMS, FLOAT32)
        self._call("MatmulDescSetAttribute", self._operation, TRANSPOSE_A, byref(c_int(1)), c_size_t(4))
        self._a = self._layout(inputs, outputs)
        self._b = self._layout(inputs, rows)
        self._d = self._layout(outputs, rows)

    def _layout(self, height: int, width: int) -> c_void_p:
        layout = c_void_p()
        self._call(
            "MatrixLayoutCreate", byref(layout), BFLOAT16, c_uint64(height), c_uint64(width), c_int64(height)
        )
        return layout

    def _call(self, name: str, *args: Any) -> None:
        if status := getattr(self._library, f"cublasLt{name}")(*args):
            raise CublasError(f"cublasLt{name} ended with {status}")

    @property
    def _shape(self) -> tuple[c_void_p, ...]:
        return self._handle, self._operation, self._a, self._b, self._d, self._d

    def proposed(self) -> Iterator[_Algorithm]:
        """What cuBLASLt would take, the best by its estimate first."""
        preference, count = c_void_p(), c_int()
        found = (_Found * ASKED)()
        self._call("MatmulPreferenceCreate", byref(preference))
        most = byref(c_size_t(WORKSPACE))
        self._call("MatmulPreferenceSetAttribute", preference, MOST_WORKSPACE, most, c_size_t(8))
        self._call("MatmulAlgoGetHeuristic", *self._shape, preference, ASKED, found, byref(count))
        self._call("MatmulPreferenceDestroy", preference)
        for one in found[: count.value]:
            yield one.algorithm

    def read(self, algorithm: _Algorithm, attribute: int) -> int:
        """One of an algorithm's attributes, in cuBLASLt's numbers."""
        value, size = c_uint32(), c_size_t()
        width = c_size_t(2 if attribute == CLUSTER else 4)
        self._call(
            "MatmulAlgoConfigGetAttribute", byref(algorithm), attribute, byref(value), width, byref(size)
        )
        return value.value

    def algorithm(self, choice: Choice) -> _Algorithm | None:
        """The proposed algorithm with that tile, and of that kind, changed to the rest of the choice; None
        where this version of cuBLASLt has none or cannot run it so."""
        wanted = {CLUSTER: choice.cluster, SWIZZLE: choice.swizzle, SPLIT: choice.split}
        wanted[REDUCTION] = IN_FLOAT32 if choice.split > 1 else 0
        for algorithm in self.proposed():
            if self.read(algorithm, TILE) != choice.tile:
                continue
            if choice.kind in (None, self.read(algorithm, KIND)) and self._runs(algorithm, wanted):
                return algorithm
        return None

    def _runs(self, algorithm: _Algorithm, wanted: dict[int, int]) -> bool:
        """Change an algorithm's attributes; whether it can still be run."""
        set_one, refused = self._library.cublasLtMatmulAlgoConfigSetAttribute, 0
        for attribute, value in wanted.items():
            number = c_uint16(value) if attribute == CLUSTER else c_uint32(value)
            refused |= set_one(byref(algorithm), attribute, byref(number), c_size_t(ctypes.sizeof(number)))
        needs = _Found()
        refused |= self._library.cublasLtMatmulAlgoCheck(*self._shape, byref(algorithm), byref(needs))
        return not refused and needs.workspace <= WORKSPACE

    def run(self, x: Tensor, weight: Tensor, algorithm: _Algorithm) -> Tensor:
        """A new [rows, outputs] of contiguous `x` [rows, inputs] and `weight` [outputs, inputs]."""
        out = x.new_empty(len(x), len(weight))
        at, stream = c_void_p(out.data_ptr()), torch.cuda.current_stream().cuda_stream
        self._call(
            "Matmul",
            self._handle,
            self._operation,
            byref(c_float(1.0)),
            c_void_p(weight.data_ptr()),
            self._a,
            c_void_p(x.data_ptr()),
            self._b,
            byref(c_float(0.0)),
            at,
            self._d,
            at,
            self._d,
            byref(algorithm),
            c_void_p(self._space.data_ptr()),
            c_size_t(WORKSPACE),
            c_void_p(stream),
        )
        return out


class Products:
    """Products by chosen algorithms. Owner: launch thread, once built."""

    def __init__(self, chosen: Mapping[Sizes, Choice], device: torch.device) -> None:
        """Raises `CublasError` where torch's cuBLASLt cannot be loaded."""
        major = str(torch.version.cuda).split(".")[0]
        try:
            self._library = ctypes.CDLL(f"libcublasLt.so.{major}")
        except OSError as error:
            raise CublasError(str(error)) from error
        self._handle = c_void_p()
        if status := self._library.cublasLtCreate(byref(self._handle)):
            raise CublasError(f"cublasLtCreate ended with {status}")
        self._chosen = chosen
        self._space = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        self._by_size: dict[Sizes, tuple[Product, _Algorithm] | None] = {}

    def product(self, rows: int, outputs: int, inputs: int) -> Product:
        """The product of one shape."""
        return Product(self._library, self._handle, self._space, (rows, outputs, inputs))

    def run(self, x: Tensor, weight: Tensor) -> Tensor | None:
        """x Wᵀ of `x` [n, inputs] and contiguous `weight` [outputs, inputs]: a new [n, outputs], or None
        where cuBLAS shall choose by itself."""
        sizes = (len(x), *weight.shape)
        choice = self._chosen.get((MANY, *weight.shape) if len(x) >= LEAST_ROWS else sizes)
        if choice is None or x.dtype != torch.bfloat16 or not x.is_contiguous():
            return None
        if sizes not in self._by_size:
            self._by_size[sizes] = self._find(sizes, choice)
        if (found := self._by_size[sizes]) is None:
            return None
        return found[0].run(x, weight, found[1])

    def _find(self, sizes: Sizes, choice: Choice) -> tuple[Product, _Algorithm] | None:
        try:
            product = self.product(*sizes)
            algorithm = product.algorithm(choice)
        except CublasError as error:
            log.info("cuBLAS chooses for %d rows, %d outputs of %d inputs: %s", *sizes, error)
            return None
        return None if algorithm is None else (product, algorithm)


def products(device_name: str, device: torch.device) -> Products | None:
    """Products of this device; None where nothing was measured, or where cuBLASLt cannot be reached."""
    if not (chosen := choices(device_name)):
        return None
    try:
        return Products(chosen, device)
    except CublasError as error:
        log.info("cuBLAS chooses its algorithms by itself: %s", error)
        return None
