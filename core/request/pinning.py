"""Prefixes of a prompt that its client wants kept in the cache."""

from __future__ import annotations

import msgspec


class Pinning(msgspec.Struct):
    """Prefixes to pin, and how much of them was pinned. Pages count against the share of `owner`."""

    owner: str
    marks: tuple[tuple[int, float], ...]
    """(tokens from the prompt's start, seconds)."""
    kept: tuple[int, ...] = ()
    """Tokens that were pinned, by mark; empty until the whole prompt is planned."""
