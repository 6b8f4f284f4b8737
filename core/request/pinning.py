"""What of a prompt its client wants kept in the cache."""

from __future__ import annotations

import msgspec


class Pinning(msgspec.Struct):
    """Prefixes of a prompt that are to stay, and what came of it.

    `owner` is whose share of the pool they count against.
    """

    owner: str
    marks: tuple[tuple[int, float], ...]
    """(tokens from the prompt's start, seconds)."""
    kept: tuple[int, ...] = ()
    """By mark, the tokens that were pinned; empty until the whole prompt is planned."""
