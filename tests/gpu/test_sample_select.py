"""Ties go to the lowest id, NaN is never overlooked."""

from __future__ import annotations

import math

import pytest
import torch

from gpu.sample.select import argmax, at_least, below, largest, where


def test_argmax_takes_the_lowest_of_equals() -> None:
    values = torch.tensor([[1.0, 3.0, 3.0], [-math.inf, -5.0, -5.0], [0.0, 0.0, 0.0]])
    assert argmax(values).tolist() == [1, 1, 0]
    assert int(argmax(values[0])) == 1


def test_argmax_finds_nan_before_infinity() -> None:
    values = torch.tensor([[math.inf, math.nan, 3.0], [math.nan, math.nan, math.inf]])
    assert argmax(values).tolist() == [1, 0]


def test_argmax_of_no_rows() -> None:
    assert argmax(torch.empty(0, 5)).tolist() == []


def test_a_floor_splits_a_row_in_two() -> None:
    values = torch.tensor([0.1, 5.0, 0.3, 0.3, -math.inf])
    assert at_least(values, float(values[2])).tolist() == [1, 2, 3]
    assert below(values, float(values[2])).tolist() == [0, 4]
    assert where(values > 1).tolist() == [1]


@pytest.mark.parametrize("count", range(1, 9))
def test_largest_is_the_head_of_a_stable_sort(count: int) -> None:
    values = torch.tensor([2.0, 7.0, 2.0, 2.0, 9.0, -1.0, 7.0, 2.0])
    order = values.sort(descending=True, stable=True)
    floor = float(order.values[count - 1])
    assert largest(values, floor, count).tolist() == sorted(order.indices[:count].tolist())
