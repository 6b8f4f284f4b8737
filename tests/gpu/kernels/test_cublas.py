"""Which products cuBLASLt is asked for by name, and that they are products."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench.kernels.products import write
from gpu.kernels.cublas import LEAST_ROWS, MANY, Choice, Products, Sizes, choices, products
from gpu.kernels.linear_mid import MOST_ROWS

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
