"""Products that cuBLASLt is asked for by name, and that they are products."""

from __future__ import annotations

import json
from collections.abc import Callable
from ctypes import c_void_p
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.kernels.products import write
from gpu.kernels.gemm.cublaslt import (
    CLUSTER,
    IN_FLOAT32,
    KIND,
    LEAST_ROWS,
    MANY,
    REDUCTION,
    SPLIT,
    SWIZZLE,
    TILE,
    Choice,
    Product,
    Products,
    Sizes,
    choices,
    products,
)
from gpu.kernels.gemm.skinny import MOST_ROWS

H200 = "NVIDIA H200"


def test_choices_of_a_device_are_by_shape(tmp_path: Path) -> None:
    few = {"tile": 208, "cluster": 3, "swizzle": 0, "split": 2, "kind": 1}
    text = json.dumps({"64x32": {"tile": 24, "cluster": 5, "swizzle": 1}, "192x64x32": few})
    (tmp_path / "dense_bfloat16_NVIDIA_H200.json").write_text(text)
    assert choices(H200, tmp_path) == {
        (MANY, 64, 32): Choice(24, 5, 1),
        (192, 64, 32): Choice(208, 3, 0, 2, 1),
    }
    assert choices("another", tmp_path) == {}


def test_a_search_replaces_the_row_counts_it_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "dense_bfloat16_NVIDIA_H200.json"
    old = {"tile": 24, "cluster": 5}
    path.write_text(json.dumps(dict.fromkeys(("192x64x32", "64x32", "128x64x32", "80x64x32"), old)))
    write(path, {"128x64x32": {"tile": 15, "cluster": 2}}, [128, 192])
    found = choices(H200, tmp_path)
    assert list(found) == [(MANY, 64, 32), (80, 64, 32), (128, 64, 32)]
    assert found[128, 64, 32] == Choice(15, 2) and found[80, 64, 32] == Choice(24, 5)


def test_what_is_shipped_is_whole() -> None:
    shipped = choices(H200)
    assert shipped
    for (rows, *sides), choice in shipped.items():
        assert rows == MANY or MOST_ROWS < rows <= 512
        assert min(sides) > 0 and choice.swizzle in (0, 1) and choice.split >= 1


class Refusing:
    """A library whose every call fails but the first, which makes its handle."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *args: 0 if name == "cublasLtCreate" else 15


def test_what_the_library_refuses_is_left_to_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: Refusing())
    many = Products({(MANY, 16, 8): Choice(24, 5, 0), (192, 16, 8): Choice(24, 5)}, torch.device("cpu"))
    x, weight = (torch.ones(n, 8, dtype=torch.bfloat16) for n in (LEAST_ROWS, 16))
    assert many.run(x, weight) is None
    assert many.run(x, weight) is None
    assert many.run(x[:192], weight) is None


class Proposing:
    """A library that proposes algorithms, each by its tile and kind, and keeps what is set of them."""

    def __init__(self, proposals: list[tuple[int, int]]) -> None:
        self.proposals = proposals
        self.set: list[tuple[int, int, int]] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *args: 0

    def cublasLtMatmulAlgoGetHeuristic(self, *args: Any) -> int:
        *_, found, count = args
        for at, (tile, kind) in enumerate(self.proposals):
            found[at].algorithm.data[TILE], found[at].algorithm.data[KIND] = tile, kind
        count._obj.value = len(self.proposals)
        return 0

    def cublasLtMatmulAlgoConfigGetAttribute(
        self, algorithm: Any, attribute: int, value: Any, *_: Any
    ) -> int:
        value._obj.value = algorithm._obj.data[attribute]
        return 0

    def cublasLtMatmulAlgoConfigSetAttribute(self, _: Any, attribute: int, value: Any, size: Any) -> int:
        self.set.append((attribute, value._obj.value, size.value))
        return 0


def test_a_choice_is_the_proposal_of_its_tile_and_kind_with_the_rest_set() -> None:
    library = Proposing([(15, 0), (208, 0), (208, 1)])
    product = Product(library, c_void_p(), torch.empty(0), (192, 16, 8))
    found = product.algorithm(Choice(208, 3, split=2, kind=1))
    assert found is not None and found.data[KIND] == 1
    assert sorted(library.set) == [
        (SPLIT, 2, 4),
        (REDUCTION, IN_FLOAT32, 4),
        (SWIZZLE, 0, 4),
        (CLUSTER, 3, 2),
    ]
    library.set.clear()
    found = product.algorithm(Choice(208, 5, swizzle=1))
    assert found is not None and found.data[KIND] == 0
    assert sorted(library.set) == [(SPLIT, 1, 4), (REDUCTION, 0, 4), (SWIZZLE, 1, 4), (CLUSTER, 5, 2)]
    assert product.algorithm(Choice(208, 3, kind=7)) is None


def test_nothing_is_chosen_where_nothing_was_measured() -> None:
    assert products("another", torch.device("cpu")) is None


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", choices(H200), ids=str)
def test_products_are_those_of_cublas(sizes: Sizes, device: torch.device) -> None:
    rows, outputs, inputs = sizes
    many = products(H200, device)
    assert many is not None
    x = torch.randn(rows if rows != MANY else LEAST_ROWS + 8, inputs, device=device).bfloat16()
    weight = (torch.randn(outputs, inputs, device=device) * inputs**-0.5).bfloat16()
    found, again = many.run(x, weight), many.run(x, weight)
    if found is None or again is None:
        pytest.skip("cuBLASLt proposes this algorithm on some hosts alone: then the product is cuBLAS's own")
    assert torch.equal(found, again)
    torch.testing.assert_close(found, torch.nn.functional.linear(x, weight), rtol=2e-2, atol=2e-2)
    assert many.run(x[:-9], weight) is None
    assert many.run(x.half(), weight.half()) is None


@pytest.mark.gpu
def test_an_algorithm_that_is_not_proposed_is_left_out(device: torch.device) -> None:
    many = Products({(MANY, 256, 512): Choice(60_000, 5, 0)}, device)
    x, weight = (torch.ones(n, 512, dtype=torch.bfloat16, device=device) for n in (LEAST_ROWS, 256))
    assert many.run(x, weight) is None
