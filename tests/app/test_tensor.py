"""Tensors from bytes: what torch.save, numpy and safetensors write is read exactly; what could do harm, or
cost much, is refused and never run."""

from __future__ import annotations

import io
import pickle
import random
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from app.api.request.tensor import Dense, TensorError, read_tensor
from tests.rigs.tensors import npy

GENERATOR = torch.Generator().manual_seed(1)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def saved(value: Any, **more: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, **more)
    return out.getvalue()


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR).to(dtype)


def whole(tensor: Dense) -> np.ndarray:
    """The whole tensor in two reads, as if it were long."""
    middle = tensor.rows // 2
    return np.concatenate([tensor.floats(0, middle), tensor.floats(middle, tensor.rows)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "cut",
    [
        lambda x: x,
        lambda x: x[None],
        lambda x: x[2:5],
        lambda x: x[:1],
        lambda x: x[0][None],
        lambda x: x.requires_grad_(),
        lambda x: x.repeat(300, 30),
        lambda x: x.repeat(9000, 1),
    ],
)
def test_torch(cut: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> None:
    tensor = cut(rows(8, 5, dtype=dtype))
    read = read_tensor(saved(tensor))
    want = tensor.detach().float().reshape(-1, tensor.shape[-1]).numpy()
    assert (read.rows, read.columns) == want.shape
    np.testing.assert_array_equal(whole(read), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_safetensors(dtype: torch.dtype) -> None:
    tensor = rows(7, 5, dtype=dtype)
    read = read_tensor(safetensors.torch.save({"any": tensor}, {"made": "by"}))
    np.testing.assert_array_equal(whole(read), tensor.float().numpy())


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("shape", [(7, 5), (1, 7, 5)])
def test_npy(dtype: type, shape: tuple[int, ...]) -> None:
    array = rows(*shape).numpy().astype(dtype)
    np.testing.assert_array_equal(whole(read_tensor(npy(array))), array.astype(np.float32).reshape(7, 5))


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (rows(4, 4).t(), "contiguous"),
        (rows(4, 4)[:, :2], "contiguous"),
        (rows(1, 4).expand(9, 4), "contiguous"),
        (rows(4, 4).double(), "float32, float16 or bfloat16"),
        (rows(4, 4).long(), "float32, float16 or bfloat16"),
        (rows(4, 4).to_sparse(), "one dense tensor"),
        (torch.nn.Parameter(rows(2, 2)), "one dense tensor"),
        ({"a": rows(2, 2)}, "one dense tensor"),
        ([rows(2, 2)], "one dense tensor"),
        (rows(4), "shape"),
        (rows(2, 2, 2), "shape"),
        (rows(1, 1, 2, 2), "one dense tensor"),
        (rows(0, 4), "shape"),
        (rows(4, 0), "contiguous"),
    ],
)
def test_what_else_torch_saves(value: Any, why: str) -> None:
    with pytest.raises(TensorError, match=why):
        read_tensor(saved(value))


def test_old_and_foreign_formats() -> None:
    for data in (
        saved(rows(2, 2), _use_new_zipfile_serialization=False),
        pickle.dumps([1]),
        b"",
        b"PK\x03\x04",
    ):
        with pytest.raises(TensorError):
            read_tensor(data)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(4, np.float32),
        np.zeros((2, 2)),
        np.zeros((2, 2), ">f4"),
        np.asfortranarray(np.ones((2, 3), "f4")),
        np.array([[{}]], object),
        np.zeros((2, 2), [("a", "<f4")]),
    ],
)
def test_other_arrays(array: np.ndarray) -> None:
    with pytest.raises(TensorError, match="npy"):
        read_tensor(npy(array))


# -- on purpose ------------------------------------------------------------------------------------


class Trap:
    """An object that runs code when it is unpickled."""

    sprung = False

    @staticmethod
    def spring() -> None:
        Trap.sprung = True

    def __reduce__(self) -> tuple[Any, ...]:
        return Trap.spring, ()


def rezipped(data: bytes, how: int = zipfile.ZIP_STORED, **files: bytes) -> bytes:
    """A torch file with other contents: `data_pkl` for archive/data.pkl, `numbers` for archive/data/0."""
    names = {"archive/data.pkl": files.get("data_pkl"), "archive/data/0": files.get("numbers")}
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", how) as new:
        for name in old.namelist():
            new.writestr(name, names.get(name) or old.read(name))
    return out.getvalue()


def pickled(data: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as old:
        return old.read("archive/data.pkl")


def test_no_pickle_is_run() -> None:
    good = saved(rows(2, 2))
    traps = [pickle.dumps(Trap(), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    honest = pickled(good)
    for code in (*traps, traps[2][:-1] + honest[2:], honest[:-1] + traps[2][2:], honest + traps[2]):
        with pytest.raises(TensorError, match="one dense tensor"):
            read_tensor(rezipped(good, data_pkl=code))
    for data in (*traps, npy(np.array([[Trap()]], object))):
        with pytest.raises(TensorError):
            read_tensor(data)
    assert not Trap.sprung
    assert read_tensor(rezipped(good)).rows == 2


@pytest.mark.parametrize("how", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_bomb_is_not_unpacked(how: int) -> None:
    data = rezipped(saved(rows(4, 4)), how, numbers=bytes(2**24))
    assert len(data) < 2**17
    tracemalloc.start()
    with pytest.raises(TensorError, match="compressed"):
        read_tensor(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**19


def test_sizes_that_are_claimed() -> None:
    """Claimed shapes, storages and offsets read nothing beyond the bytes that are there, and allocate
    nothing."""
    good = saved(rows(3, 4))
    code = pickled(good)
    large = b"J\xff\xff\xff\x7f"
    for claim in (
        code.replace(b"K\x03K\x04\x86", large + b"K\x04\x86"),
        code.replace(b"K\x03K\x04\x86", b"K\x04K\x04\x86"),
        code.replace(b"K\x03K\x04\x86", b"J\xff\xff\xff\xffK\x04\x86"),
        code.replace(b"K\x0ct", large + b"t"),
        code.replace(b"QK\x00", b"QK\x01"),
        code.replace(b"QK\x00", b"QJ\xf0\xff\xff\xff"),
    ):
        assert claim != code
        with pytest.raises(TensorError):
            read_tensor(rezipped(good, data_pkl=claim))
    with pytest.raises(TensorError, match="storage"):
        read_tensor(rezipped(good, numbers=bytes(44)))


def test_a_zip_of_many_files() -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as made:
        for i in range(5000):
            made.writestr(str(i), b"")
    with pytest.raises(TensorError, match="more than 16 files"):
        read_tensor(out.getvalue())


def test_headers_that_are_hostile() -> None:
    def tensors(header: bytes, numbers: bytes = bytes(16)) -> bytes:
        return struct.pack("<Q", len(header)) + header + numbers

    for header in (
        b'{"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,17]}}',
        b'{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,16]}}',
        b'{"a":{"dtype":"F32","shape":[-2,-2],"data_offsets":[0,16]}}',
        b'{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,16]}}',
        b'{"a":{"dtype":"F32","shape":[2,2],"data_offsets":[16,0]}}',
        b'{"a":{"dtype":"F64","shape":[1,2],"data_offsets":[0,16]}}',
        b'{"a":{"dtype":"F32","shape":"x","data_offsets":[0,16]}}',
        b"{" * 4000,
        b'{"\xff":1}',
        b"{}",
        b'{"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},"b":1}',
    ):
        with pytest.raises(TensorError):
            read_tensor(tensors(header))
    for shape in (b"(999999999, 999999999)", b"(2, -2)", b"(" * 500, b"__import__('os')"):
        header = b"{'descr': '<f4', 'fortran_order': False, 'shape': " + shape + b", }\n"
        with pytest.raises(TensorError):
            read_tensor(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(16))


@pytest.mark.parametrize("good", [saved(rows(3, 4)), npy(np.ones((3, 4), np.float32)),
                                  safetensors.torch.save({"a": rows(3, 4)})])  # fmt: skip
def test_broken_bytes_are_an_error_or_a_tensor(good: bytes) -> None:
    rng = random.Random(4)
    for _ in range(1500):
        data = bytearray(good)
        for _ in range(rng.choice((1, 1, 2, 8))):
            data[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        try:
            read = read_tensor(
                bytes(data[: rng.choice((len(data), len(data), rng.randrange(len(data) + 1)))])
            )
        except TensorError:
            continue
        assert read.floats(0, read.rows).shape == (read.rows, read.columns)
        assert 0 < read.rows * read.columns <= 24
