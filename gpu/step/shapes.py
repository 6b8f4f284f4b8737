"""The sizes that steps are padded to: few enough to capture all, close enough to waste little."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

MAX_SAMPLES = 1024
"""Where rows have drafts: rows of logits, each 0.6 MB of a vocabulary of 152,000. At 256 rows that is three
drafts each, and more tokens than a step verifies at the speed of its weights."""


def decode_sizes(most: int) -> list[int]:
    """Padded token counts of decode-only steps, where every token is sampled: one per row, plus drafts.
    Larger sizes lie further apart.

    A padded token costs arithmetic only: it routes to no expert and reads no page.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 513, 32)]
    sizes += range(576, most + 64, 64)
    return _upto(sizes, most)


def query_sizes(most_drafts: int) -> list[int]:
    """Tokens of a decode row that steps are padded to: one, then the powers of two that fill a tile of
    attention's queries, then all. A padded one costs arithmetic only."""
    return _upto([1, 4, 8, 16, 32], 1 + most_drafts)


def mixed_sizes(max_tokens: int) -> list[int]:
    """Token counts of steps with chunks: by 64 to 512, by 256 to 4,096, then by 512.

    A padded token costs its share of every product: at 256 rows that decode beside two prompts of 1,024, a
    size of 3,072 in place of 2,304 would be a third more work.
    """
    sizes = [*range(64, 512, 64), *range(512, 4096, 256), *range(4096, max_tokens + 512, 512)]
    return _upto(sizes, max_tokens)


def _upto(sizes: Sequence[int], most: int) -> list[int]:
    """Sizes below `most`, and `most` itself."""
    return [size for size in sizes if size < most] + [most]


def fit(sizes: Sequence[int], count: int) -> int:
    """The least of ascending `sizes` that holds `count`."""
    return sizes[bisect_left(sizes, count)]


def most_samples(rows: int, tokens: int, drafts: int) -> int:
    """Tokens that a step may sample: one of each row and its drafts, up to `MAX_SAMPLES`."""
    return max(rows, min(rows * (1 + drafts), tokens, MAX_SAMPLES))
