"""A tensor that a client sends: bytes of torch.save, .npy or safetensors, read as data and nothing else.

torch.save writes a zip of uncompressed files: a small pickle that describes the tensor, and its numbers.
Loading that pickle runs what it names, and `weights_only` was broken more than once (CVE-2025-32434,
CVE-2026-24747; vLLM's prompt embeddings through sparse tensors: CVE-2025-62164). Here no pickle is run:
its bytes are compared with the one shape that a dense tensor has. Nothing is allocated by a size that the
bytes claim; a shape of more than they hold is an error. A .npy header is compared too: numpy's own
reader evaluates it as Python text, and lets errors of the tokenizer and of memory through.
"""

from __future__ import annotations

import math
import re
import struct
from typing import NamedTuple

import numpy as np
import safetensors

from core.types import Floats

WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2}
"""The types that are taken, and bytes of a number."""

MAX_FILES = 16
"""Files in a zip. torch.save writes seven."""


class TensorError(ValueError):
    """The bytes are no tensor that is accepted; the message has the reason, and what to send."""


class Dense(NamedTuple):
    """Numbers in rows, one after the other. `data` [rows * columns] in little-endian `dtype`."""

    dtype: str
    rows: int
    columns: int
    data: memoryview

    def floats(self, first: int, last: int) -> Floats:
        """Rows `first` ... `last` - 1 as float32 [last - first, columns]."""
        width = WIDTHS[self.dtype] * self.columns
        part = self.data[first * width : last * width]
        if self.dtype == "bfloat16":  # numpy has none: it is the upper half of a float32
            found = (np.frombuffer(part, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            found = np.frombuffer(part, "<f4" if self.dtype == "float32" else "<f2").astype(np.float32)
        return found.reshape(-1, self.columns)


def read_tensor(data: bytes) -> Dense:
    """The tensor in `data`. Raises `TensorError`."""
    if data.startswith(b"PK\x03\x04"):
        return _torch(data)
    if data.startswith(b"\x93NUMPY"):
        return _numpy(data)
    if data[8:9] == b"{":
        return _safetensors(data)
    raise TensorError(
        "it is neither what torch.save writes (as a zip, its default), nor .npy, nor safetensors"
    )


def _dense(dtype: str, shape: tuple[int, ...], data: memoryview) -> Dense:
    """[n, columns], or [1, n, columns] as vLLM takes it too."""
    if len(shape) == 3 and shape[0] == 1:
        shape = shape[1:]
    if len(shape) != 2 or min(shape) < 1:
        raise TensorError(f"its shape is {list(shape)}, not [tokens, hidden size]")
    if math.prod(shape) * WIDTHS[dtype] != len(data):
        raise TensorError(f"its shape {list(shape)} of {dtype} is not the {len(data)} bytes that it has")
    return Dense(dtype, shape[0], shape[1], data)


# -- torch.save ------------------------------------------------------------------------------------

_INT = rb"(?:K.|M..|J.{4})"
_TUPLE = rb"%b\x85|%b{2}\x86|%b{3}\x87" % (_INT, _INT, _INT)
_PICKLE = re.compile(
    rb"\x80\x02ctorch\._utils\n_rebuild_tensor_v2\nq.\(\("
    rb"X\x07\0\0\0storageq.ctorch\n(Float|Half|BFloat16)Storage\nq."  # its type
    rb"X\x01\0\0\0[0]q.X.\0\0\0[a-z]{2,5}(?::[0-9])?q.(" + _INT + rb")tq.Q"  # file, device, numbers
    rb"(" + _INT + rb")"  # where in the file it begins
    rb"(" + _TUPLE + rb")q.(" + _TUPLE + rb")q."  # shape, strides
    rb"[\x88\x89]ccollections\nOrderedDict\nq.\)Rq.tq.Rq.\.",
    re.DOTALL,
)
"""Protocol 2, which torch.save uses unless told otherwise, since 1.6. The device is ignored: the numbers are
the same on all."""

_DTYPES = {b"Float": "float32", b"Half": "float16", b"BFloat16": "bfloat16"}


def _torch(data: bytes) -> Dense:
    files = _unzipped(data)
    root = next((name[: -len("data.pkl")] for name in files if name.endswith("/data.pkl")), "")
    found = _PICKLE.fullmatch(files.get(root + "data.pkl", b""))
    if found is None:
        raise TensorError(
            "torch.save was given something else than one dense tensor of float32, float16 or bfloat16; "
            "send tensor.detach().clone()"
        )
    kind, stored, offset, shape, strides = found.groups()
    numbers, order = files.get(root + "data/0"), files.get(root + "byteorder", b"little")
    if numbers is None or bytes(order) != b"little":
        raise TensorError("its numbers are not there, or not little-endian")
    dtype, (count,), (first,) = _DTYPES[kind], _ints(stored), _ints(offset)
    width = WIDTHS[dtype]
    if count * width != len(numbers):
        raise TensorError(f"its storage should have {count} numbers of {dtype}, and has {len(numbers)} bytes")
    sizes = _sizes(_ints(shape[:-1]), _ints(strides[:-1]), count - first)
    return _dense(dtype, sizes, numbers[first * width : (first + math.prod(sizes)) * width])


def _sizes(sizes: tuple[int, ...], strides: tuple[int, ...], room: int) -> tuple[int, ...]:
    """The shape of a contiguous tensor in a storage that has `room` numbers from its first on."""
    steps = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    if any(n != 1 and stride != step for n, stride, step in zip(sizes, strides, steps, strict=True)):
        raise TensorError("it is not contiguous; send tensor.contiguous()")
    if min(sizes) < 0 or math.prod(sizes) > room:
        raise TensorError("its shape reaches beyond its storage")
    return sizes


def _ints(code: bytes) -> tuple[int, ...]:
    """Integers as a pickle spells them, one byte of opcode each."""
    found = re.findall(_INT, code, re.DOTALL)
    return tuple(int.from_bytes(each[1:], "little", signed=each[:1] == b"J") for each in found)


_END = struct.Struct("<IHHHHIIH")
_ENTRY = struct.Struct("<IHHHHHHIIIHHHHHII")
_LOCAL = struct.Struct("<IHHHHHIIIHH")


def _unzipped(data: bytes) -> dict[str, memoryview]:
    """Files of a zip by name, as they stand in `data`. None may be compressed: there is no bomb."""
    view, found = memoryview(data), dict[str, memoryview]()
    try:
        signature, _, _, _, count, _, at, _ = _END.unpack_from(data, len(data) - _END.size)
        if signature != 0x06054B50 or count > MAX_FILES:
            raise TensorError(f"its zip is cut short, or has more than {MAX_FILES} files")
        for _ in range(count):
            entry = _ENTRY.unpack_from(data, at)
            flags, method, packed, size, name_size = entry[3], entry[4], entry[8], entry[9], entry[10]
            name = data[at + _ENTRY.size : at + _ENTRY.size + name_size].decode()
            begin = entry[16]
            local = _LOCAL.unpack_from(data, begin)
            begin += _LOCAL.size + local[9] + local[10]
            if (entry[0], local[0]) != (0x02014B50, 0x04034B50) or flags & 1 or method or packed != size:
                raise TensorError(
                    "its zip is broken, compressed or encrypted; torch.save writes none of these"
                )
            if begin + size > len(data):
                raise TensorError("a file of its zip is longer than what was sent")
            found[name] = view[begin : begin + size]
            at += _ENTRY.size + name_size + entry[11] + entry[12]
    except (struct.error, UnicodeDecodeError):
        raise TensorError("its zip is broken") from None
    return found


# -- the others ------------------------------------------------------------------------------------

_HEADER = re.compile(
    rb"\{'descr': '<f([24])', 'fortran_order': False, "
    rb"'shape': \(([0-9]{1,9}(?:, [0-9]{1,9}){1,2}),?\), \} *\n"
)


def _numpy(data: bytes) -> Dense:
    """numpy's format, versions 1 to 3: a header of Python text, then the numbers."""
    wide = data[6:7] != b"\x01"
    begin = 12 if wide else 10
    end = begin + int.from_bytes(data[8:begin], "little")
    found = _HEADER.fullmatch(data[begin:end][:1024])
    if found is None:
        raise TensorError("its .npy is not a contiguous array of '<f4' or '<f2' in two dimensions")
    shape = tuple(int(n) for n in found.group(2).split(b", "))
    return _dense("float32" if found.group(1) == b"4" else "float16", shape, memoryview(data)[end:])


_SAFE = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def _safetensors(data: bytes) -> Dense:
    """One tensor of any name. The library copies its numbers: 0.2 ms for the 6 MB that a body can hold."""
    if int.from_bytes(data[:8], "little") > 4096:
        raise TensorError("its safetensors header is longer than one tensor needs")
    try:
        tensors = safetensors.deserialize(data)
    except safetensors.SafetensorError as error:
        raise TensorError(f"its safetensors is broken: {error}") from None
    if len(tensors) != 1:
        raise TensorError(f"its safetensors has {len(tensors)} tensors; send one")
    tensor = tensors[0][1]
    if tensor["dtype"] not in _SAFE:
        raise TensorError("its safetensors header does not name an F32, F16 or BF16 tensor")
    return _dense(_SAFE[tensor["dtype"]], tuple(tensor["shape"]), memoryview(tensor["data"]))
