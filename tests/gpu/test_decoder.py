"""The layers that a warm-up runs stand for all."""

from __future__ import annotations

from itertools import pairwise

import pytest

from gpu.models.decoder import distinct_layers


@pytest.mark.parametrize("kinds", ["a", "aa", "aaaaa", "abababab", "aabbaabb", "daaaaaa", "abcabcaab"])
def test_each_pair_of_neighbours_is_among_the_unlike_layers(kinds: str) -> None:
    kept = distinct_layers(kinds)
    assert kept == sorted(set(kept))
    assert kept[0] == 0 and kept[-1] == len(kinds) - 1
    neighbours = {(kinds[i], kinds[j]) for i, j in pairwise(kept) if j == i + 1}
    assert neighbours == set(pairwise(kinds))


def test_layers_of_one_kind_are_few() -> None:
    assert distinct_layers("a" * 48) == [0, 1, 47]
