"""What makes two prefixes equal: their units, one int64 each, compared exactly.

A key is kept as `bytes`, eight per unit: comparing two is one memcmp, and a page of it is a
dictionary key without conversion. As numpy arrays the same walk was measured ten times slower.
Nothing is hashed down, so two different prefixes can never be taken for each other.
"""

from __future__ import annotations

import numpy as np

from core.types import Ints

WIDTH = 8
"""Bytes of a unit."""


def num_units(num_tokens: int, bigram: bool) -> int:
    """Units that `num_tokens` tokens make: one each, or one for each neighbouring pair."""
    return max(num_tokens - 1, 0) if bigram else num_tokens


def pack(tokens: Ints, start: int, end: int, bigram: bool) -> bytes:
    """Units `start` ... `end` - 1 of `tokens` (int32 [n], end <= num_units(n)).

    Plain: unit i is token i. Bigram, for drafts whose KV at i was made from tokens i and i + 1:
    unit i is both, one in each half of the int64.
    """
    units = tokens[start:end].astype(np.int64)
    if bigram:
        units <<= 32
        units |= tokens[start + 1 : end + 1].astype(np.int64) & 0xFFFFFFFF
    return units.tobytes()


def common_units(key: bytes, at: int, other: bytes) -> int:
    """How many leading units of `other` stand in `key` from byte `at` on."""
    n = min(len(key) - at, len(other)) // WIDTH
    differs = np.frombuffer(key, np.int64, n, at) != np.frombuffer(other, np.int64, n)
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n
