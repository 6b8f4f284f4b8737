"""The GGUF container, versions 2 and 3, little-endian: facts and where the tensors lie.

Read here and not through `gguf.GGUFReader`, which makes an array per vocabulary entry: 2.0 s to open
the default model against 0.02 s. The format is llama.cpp's docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from core.errors import ModelError

Fact = int | float | bool | str

_SCALARS: Mapping[int, struct.Struct] = {
    kind: struct.Struct("<" + code)
    for kind, code in {
        0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"
    }.items()
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_ALIGNMENT = 32
"""Of the tensors, unless general.alignment says otherwise."""


class GgufTensor(NamedTuple):
    """`shape` in torch's order, rows first; `kind` is a `gguf.GGMLQuantizationType`; `offset` in the
    file's tensor data."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


class GgufFile:
    """One mapped file. Arrays among the facts (the vocabulary) are skipped: tokenizers have their
    own reader."""

    __slots__ = ("_at", "_data", "_path", "_start", "facts", "tensors")

    def __init__(self, path: Path) -> None:
        """Raises `ModelError` for a file that is missing, truncated or something else."""
        self._path = path
        self._at = 0
        if not path.is_file():
            raise ModelError(f"{path} is missing.")
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self.facts: dict[str, Fact] = {}
            self.tensors: list[GgufTensor] = []
            self._read_header()
        except (ValueError, KeyError, OSError, struct.error) as error:
            raise self._broken(error) from error
        alignment = int(self.facts.get("general.alignment", _ALIGNMENT))
        self._start = -(-self._at // alignment) * alignment

    def rows(self, tensor: GgufTensor, row_bytes: int) -> NDArray[np.uint8]:
        """The tensor's bytes [..., row_bytes], a view of the mapped file."""
        shape = (*tensor.shape[:-1], row_bytes)
        count = int(np.prod(shape))
        first = self._start + tensor.offset
        if first + count > len(self._data):
            raise self._broken(f"{tensor.name} ends behind the file")
        return np.frombuffer(self._data, np.uint8, count, first).reshape(shape)

    def _broken(self, what: object) -> ModelError:
        return ModelError(f"{self._path} is truncated or not a GGUF file ({what}): fetch it again.")

    def _read_header(self) -> None:
        if self._data[:4] != b"GGUF":
            raise ValueError("no GGUF magic")
        self._at = 4
        version = self._scalar(_U32)
        if version not in (2, 3):
            raise ValueError(f"version {version}")
        tensors, facts = self._scalar(_U64), self._scalar(_U64)
        for _ in range(facts):
            name = self._string()
            value = self._value(self._scalar(_U32))
            if value is not None:
                self.facts[name] = value
        for _ in range(tensors):
            name = self._string()
            shape = [self._scalar(_U64) for _ in range(self._scalar(_U32))]
            kind, offset = self._scalar(_U32), self._scalar(_U64)
            self.tensors.append(GgufTensor(name, tuple(reversed(shape)), kind, offset))

    def _value(self, kind: int) -> Fact | None:
        """The next value, None for an array, which is stepped over."""
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            value: Fact = self._scalar(_SCALARS[kind])
            return value
        item, count = self._scalar(_U32), self._scalar(_U64)
        if item in _SCALARS:
            self._at += count * _SCALARS[item].size
            return None
        for _ in range(count):
            if item == _STRING:
                size = self._scalar(_U64)
                self._at += size
            else:
                self._value(item)
        return None

    def _scalar(self, kind: struct.Struct) -> int:
        # float and bool come out as what they are; int is what most callers read.
        value: int = kind.unpack_from(self._data, self._at)[0]
        self._at += kind.size
        return value

    def _string(self) -> str:
        size = self._scalar(_U64)
        if self._at + size > len(self._data):
            raise ValueError("a string ends behind the file")
        self._at += size
        return self._data[self._at - size : self._at].decode("utf-8")
