"""Sequences in the prefix cache."""

from __future__ import annotations

import numpy as np

from core.cache import CacheManager, Hold
from core.types import Ints, RootKey

A = RootKey()
B = RootKey(adapter="b")


def seq(n: int, start: int = 0) -> Ints:
    return np.arange(start, start + n, dtype=np.int32)


def admit(cache: CacheManager, tokens: Ints, root: RootKey = A, room: int = 0) -> Hold:
    """Reserve pages as the scheduler does: all but the last token may be cached."""
    hold = cache.try_reserve(cache.match(root, tokens, len(tokens) - 1), len(tokens) + room)
    assert hold is not None
    return hold
