"""Frozen snapshots that each owner publishes. Metrics and `/server_info` read only these."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import msgspec
import numpy as np

from core.types import Ints


class CacheStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Pages of the pool (the dump not counted) and what the radix tree did so far."""

    page_size: int
    total: int
    free: int
    cached: int
    """Pages in the tree, unlocked: they can be evicted."""
    protected: int
    """Pages in the tree, under a running request."""
    pinned: int = 0
    """Pages in the tree, kept for a client that asked for it; some of them protected too."""
    pins: int = 0
    """Prefixes that are kept so."""
    nodes: int
    queried_tokens: int
    """Looked up by requests that were admitted."""
    hit_tokens: int
    """Tokens of `queried_tokens` that were found."""
    evicted_pages: int
    """Dropped to make room; a flush does not count."""


class Workload(NamedTuple):
    """Requests that run or wait, tokens of those that wait, and these with what the running ones hold.

    `free` are the slots that those that wait leave; 0 where they need more pages than there are.
    """

    requests: int
    waiting: int
    tokens: int
    free: int


class SchedulerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters grow for ever; the others are now."""

    waiting: int
    waiting_tokens: int
    retracted: int = 0
    """Waiting requests that have run before."""
    running: int
    in_flight: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    retractions: int
    refused: dict[str, int] = {}
    """Jobs that were not taken, by reason."""
    running_adapters: list[str] = []
    """Ids, as in `waiting_adapters`."""
    waiting_adapters: list[str] = []
    cache: CacheStatistics

    @property
    def used_tokens(self) -> int:
        """Tokens of the pool that are neither free nor only cached."""
        return (self.cache.total - self.cache.free - self.cache.cached) * self.cache.page_size


class Histogram(msgspec.Struct):
    """`counts[i]` observations above `bounds[i - 1]` and at most `bounds[i]`; the last are the rest.
    `total` is their sum. The counts grow in place: what was read before may be more now."""

    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """`count` observations of `value`."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count


class Histograms(msgspec.Struct, kw_only=True):
    """Seconds and tokens of requests: each is observed when the last of it is known. Requests that end before
    their first token have no times but `end_to_end`; those that generate nothing have `queue`, `prefill` and
    `inference` too."""

    ttft: Histogram
    inter_token: Histogram
    end_to_end: Histogram
    queue: Histogram
    prefill: Histogram
    decode: Histogram
    inference: Histogram
    """Prefill and decode."""
    per_token: Histogram
    """Mean of a request's inter-token latencies."""
    prompt_tokens: Histogram
    output_tokens: Histogram
    max_tokens: Histogram
    """Tokens that the request was allowed."""
    choices: Histogram
    """Requests of one job."""
    longest: Histogram
    """Output tokens of a job's longest choice."""
    step_tokens: Histogram
    """Prompt and output tokens of a step."""


class DraftStatistics(msgspec.Struct):
    """What steps did with drafts, those of requests that ended meanwhile too. Accepted are those equal to
    what was sampled, whether the client gets them or a stop cuts them off. The counts grow in place: what was
    read before may be more now."""

    per_position: list[int]
    """Accepted drafts that were the first of their row, the second, and so on."""
    rows: int = 0
    """Rows of steps with at least one draft."""
    drafted: int = 0
    accepted: int = 0

    def add(self, drafted: Ints, counts: Ints | None) -> None:
        """One step: `StepResult.drafted` and `StepResult.counts`."""
        rows = drafted.nonzero()[0]
        if not len(rows):
            return
        self.rows += len(rows)
        self.drafted += int(drafted.sum())
        if counts is None:
            return
        longer = 0
        by_length = np.bincount(counts[rows]).tolist()
        for position in range(len(by_length) - 3, -1, -1):
            longer += by_length[position + 2]
            self.per_position[position] += longer
            self.accepted += longer

    @property
    def length(self) -> float:
        """Mean tokens of a row with drafts; 0 before the first."""
        return (self.rows + self.accepted) / self.rows if self.rows else 0.0

    @property
    def rate(self) -> float:
        """Share of the drafts that were accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0


class EngineStatistics(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The step loop. Seconds."""

    scheduler: SchedulerStatistics
    last_step_at: float
    """On the engine's clock; 0 before the first step."""
    step_seconds: float
    """Seconds of the last applied step."""
    device_seconds: float
    """Seconds of all applied steps: between two readings, how long the device was inside one."""
    loop_lag: float
    """Highest of the last seconds."""
    finished: dict[str, int]
    """Requests by the finish reason that their clients got."""
    stream_interval: int
    """Steps whose tokens are one event of a stream."""
    output_rate: float
    """Output tokens per second, as `busy`."""
    busy: float
    """Share of the last second or two that the device was inside a step."""
    histograms: Histograms
    drafts: DraftStatistics | None = None
    """None without speculative decoding."""
