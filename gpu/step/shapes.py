"""The sizes that steps are padded to: few enough to capture all, close enough to waste little."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

MAX_SAMPLES = 1024
"""Most rows of logits where rows have drafts, each 0.6 MB for a vocabulary of 152,000. At 256 rows that is
three drafts each, and more tokens than a step verifies at the speed of its weights."""


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
    """Return token counts of steps with chunks: by 64 to 640, by 128 to 2,048, by 256 to 4,096, then by 512.

    A padded token costs its share of every product, and under short prompts that come one by one most steps
    have 300 to 1,500 tokens. With sizes 256 apart from 512 on, `short512` with two replicas on H100s made
    29,800 tokens/s, with closer ones 32,700. For an 8B on an H100, 704 and 832 tokens took as long as 768 and
    896: tiles of products have 128 tokens. Each size is a graph to capture at start.
    """
    sizes = [*range(64, 640, 64), *range(640, 2048, 128), *range(2048, 4096, 256)]
    return _upto([*sizes, *range(4096, max_tokens + 512, 512)], max_tokens)


def _upto(sizes: Sequence[int], most: int) -> list[int]:
    """Sizes below `most`, and `most` itself."""
    return [size for size in sizes if size < most] + [most]


def fit(sizes: Sequence[int], count: int) -> int:
    """The least of ascending `sizes` that holds `count`."""
    return sizes[bisect_left(sizes, count)]


def most_samples(rows: int, tokens: int, drafts: int) -> int:
    """Tokens that a step may sample: one of each row and its drafts, up to `MAX_SAMPLES`."""
    return max(rows, min(rows * (1 + drafts), tokens, MAX_SAMPLES))
