"""An embedding that stays in the checkpoint's file: a step reads the few rows that it needs.

    file ──pread, a row each──► bytes ──restored──► float32 [n, inputs]

The table of a vocabulary would lie in memory twice, once for the head that shares it, whose matrix is laid
out for products and gives no rows back, and once to be looked up: 223 MiB in 8 bits of a Qwen2.5-1.5B. From
the system's page cache one row takes 0.05 ms, 256 take 1.7 ms. Read and not mapped: pages of a mapping that
are touched, and 15 around each, count as the process's memory, and a file that becomes shorter would end the
process.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.errors import ModelError

Restore = Callable[[NDArray[np.uint8]], NDArray[Any]]
"""From the bytes of rows, [n, bytes of a row], to their numbers [n, inputs]."""


class FileRows:
    """Rows of a matrix [rows, inputs] in a file, which must stay as it is; replaced by a rename it does.

    Owner: launch thread.
    """

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, path: Path, first: int, stride: int, shape: tuple[int, int], restore: Restore) -> None:
        """Row i has `stride` bytes from `first` + i * `stride` on."""
        self._path, self._first, self._stride, self.shape = path, first, stride, shape
        self._restore = restore
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def part(self, start: int, rows: int) -> FileRows:
        """Return a view of `rows` rows from `start` on."""
        first = self._first + start * self._stride
        return FileRows(self._path, first, self._stride, (rows, self.shape[1]), self._restore)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, ids: Tensor) -> Tensor:
        """float32 [n, inputs] of integers `ids` [n]. Raises `ModelError` where the file is shorter by now."""
        places = (self._first + row * self._stride for row in ids.tolist())
        found = bytearray().join(os.pread(self._file, self._stride, place) for place in places)
        if len(found) != len(ids) * self._stride:
            raise ModelError(f"{self._path} was cut while it is served: start again with the whole file.")
        if not found:  # which not every format can be restored of
            return torch.empty(0, self.shape[1])
        read = np.frombuffer(found, np.uint8).reshape(len(ids), self._stride)
        values = self._restore(read).astype(np.float32, copy=False)
        return torch.from_numpy(values.reshape(len(ids), self.shape[1]))


Table = Tensor | FileRows
"""Embeddings [vocabulary, hidden]: `table[ids]` are new rows."""
