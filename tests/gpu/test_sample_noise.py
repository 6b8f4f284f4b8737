"""The noise is the documented hash, and nothing in it can be told from chance."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gpu.sample.noise import bits, exponential, row_keys
from tests.rigs.statistics import MIN_P, independent, p_value

LAST_SEED = 2**63 - 1
WORD = 0xFFFFFFFF


def draw(seeds: object, positions: object, tokens: object) -> np.ndarray:
    """Noise bits int64 [n] of n triples, each argument a number or an array [n]."""
    s, p, t = np.broadcast_arrays(*(np.asarray(v, np.int64) for v in (seeds, positions, tokens)))
    words = bits(row_keys(s, p), torch.from_numpy(t.astype(np.int32)).unsqueeze(1))
    return words.squeeze(1).numpy().astype(np.int64)


def by_definition(seed: int, position: int, token: int) -> int:
    """The module's formula in unbounded integers."""

    def mix(x: int) -> int:
        x = (x ^ x >> 16) * 0x7FEB352D & WORD
        x = (x ^ x >> 15) * 0x846CA68B & WORD
        return x ^ x >> 16

    key0, key1 = (
        mix(mix(mix(start ^ seed & WORD) ^ seed >> 32) ^ position & WORD)
        for start in (0x6A09E667, 0xBB67AE85)
    )
    x = token * 0x9E3779B9 + key0 & WORD
    x = (x ^ x >> 16) * 0x7FEB352D & WORD
    x ^= key1
    x = (x ^ x >> 15) * 0x846CA68B & WORD
    sign = x & 0x80000000
    return (x ^ (x >> 16 | (0xFFFF0000 if sign else 0))) & WORD


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**32, 0x0123_4567_89AB_CDEF, LAST_SEED])
@pytest.mark.parametrize("position", [0, 1, 40_961, 2**31 - 1])
def test_noise_is_the_documented_function(seed: int, position: int) -> None:
    tokens = [0, 1, 2, 255, 65_536, 151_935, 262_143]
    expected = [by_definition(seed, position, token) for token in tokens]
    assert all(0 <= word < 2**31 for word in expected)
    assert draw(seed, position, tokens).tolist() == expected


def test_noise_never_changes() -> None:
    # A seeded request must give the same text after an upgrade.
    assert draw([0, 7, LAST_SEED], [0, 100, 5], [0, 1234, 50_000]).tolist() == [
        1184250775,
        1991417374,
        1405326961,
    ]


def test_noise_is_the_same_wherever_a_row_and_a_token_stand() -> None:
    seeds, positions = np.array([5, 9, 5, 0]), np.array([3, 4, 3, 2**20])
    tokens = torch.arange(5_000, dtype=torch.int32)
    full = exponential(bits(row_keys(seeds, positions), tokens))
    assert torch.equal(full[0], full[2])
    for row in range(4):
        alone = row_keys(seeds[row : row + 1], positions[row : row + 1])[0]
        picked = tokens[row * 7 + 1 :: 13]
        assert torch.equal(exponential(bits(alone, picked)), full[row][picked.long()])


LINES = {
    "tokens": lambda i: (3, 17, i),
    "positions": lambda i: (3, i, 17),
    "positions far out": lambda i: (3, 2**31 - 1 - i, 17),
    "seeds": lambda i: (i, 3, 17),
    "high halves of seeds": lambda i: (i << 32, 3, 17),
    "large seeds": lambda i: (LAST_SEED - i, 3, 17),
    "seed and position together": lambda i: (i, i, 17),
    "position and token against each other": lambda i: (1, i, len(i) - i),
}


@pytest.mark.parametrize("line", LINES)
def test_noise_is_uniform_along_every_line(line: str) -> None:
    words = draw(*LINES[line](np.arange(2**18)))
    for shift in (23, 11, 0):  # the high, middle and low eight bits
        counts = np.bincount(words >> shift & 255, minlength=256)
        assert p_value(counts, np.full(256, len(words) / 256)) > MIN_P


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("step", [1, 2, 16, 256])
def test_neighbours_are_independent(line: str, step: int) -> None:
    words = draw(*LINES[line](np.arange(2**18))) >> 26
    assert independent((words[:-step], words[step:]), 32) > MIN_P


def test_each_input_bit_changes_each_noise_bit_half_the_time() -> None:
    rng = np.random.default_rng(0)
    n = 8_192
    point = [rng.integers(0, 2**62, n), rng.integers(0, 2**17, n), rng.integers(0, 2**17, n)]
    base = draw(*point)
    for argument, width in ((0, 63), (1, 17), (2, 17)):
        for bit in range(width):
            moved = list(point)
            moved[argument] = point[argument] ^ np.int64(1 << bit)
            changed = base ^ draw(*moved)
            shares = [(changed >> out & 1).mean() for out in range(31)]
            # five standard deviations of a fair coin, plus the 0.01 that a 32-bit finaliser may be off
            assert max(abs(share - 0.5) for share in shares) < 5 * 0.5 / math.sqrt(n) + 0.01, (argument, bit)


def test_exponential_never_leaves_its_range() -> None:
    ends = exponential(torch.tensor([0, 1, 2**31 - 2, 2**31 - 1], dtype=torch.int32))
    assert ends[0] == pytest.approx(2.0**-32, rel=1e-6)
    assert ends[1] == pytest.approx(3 * 2.0**-32, rel=1e-6)
    assert ends[3] == pytest.approx(24 * math.log(2), rel=1e-6)
    assert torch.equal(ends, ends.sort().values)


def test_exponential_has_the_exponential_distribution() -> None:
    n = 2**18
    words = draw(11, np.arange(n) % 512, np.arange(n) // 512)
    e = exponential(torch.from_numpy(words.astype(np.int32))).double().numpy()
    assert e.mean() == pytest.approx(1.0, abs=5 / math.sqrt(n))
    edges = -np.log1p(-np.arange(1, 1000) / 1000)
    counts = np.bincount(np.searchsorted(edges, e), minlength=1000)
    assert p_value(counts, np.full(1000, n / 1000)) > MIN_P
    # The small end decides races: its share must be right, too.
    assert (e < 1e-4).sum() == pytest.approx(n * 1e-4, abs=5 * math.sqrt(n * 1e-4))
