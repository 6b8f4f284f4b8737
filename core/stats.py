"""Frozen snapshots that each owner publishes. Metrics and `/server_info` read only these."""

from __future__ import annotations

from bisect import bisect_left

import msgspec


class CacheStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Pages of the pool (the dump not counted) and what the radix tree did so far."""

    page_size: int
    total: int
    free: int
    cached: int
    """In the tree, unlocked: can be evicted."""
    protected: int
    """In the tree, under a running request."""
    pinned: int = 0
    """In the tree, kept for a client that asked for it; some of them protected too."""
    pins: int = 0
    """Prefixes that are kept so."""
    nodes: int
    queried_tokens: int
    """Looked up by requests that were admitted."""
    hit_tokens: int
    """Of these, found."""
    evicted_pages: int
    """Dropped to make room; a flush does not count."""


class SchedulerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters grow for ever; the others are now."""

    waiting: int
    waiting_tokens: int
    running: int
    in_flight: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    retractions: int
    finished: dict[str, int]
    """Requests by finish reason."""
    cache: CacheStatistics


class Histogram(msgspec.Struct):
    """`counts[i]` observations above `bounds[i - 1]` and at most `bounds[i]`; the last are the rest.
    `total` is their sum. It grows: what was read before may be more now."""

    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """`count` observations of `value`."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count


class EngineStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The step loop. Seconds."""

    scheduler: SchedulerStatistics
    last_step_at: float
    """On the engine's clock; 0 before the first step."""
    step_seconds: float
    """Of the last applied step."""
    device_seconds: float
    """Of all applied steps: between two readings, how long the device was inside one."""
    loop_lag: float
    """Highest of the last seconds."""
    ttft: Histogram
    inter_token: Histogram
    end_to_end: Histogram
    queue: Histogram
