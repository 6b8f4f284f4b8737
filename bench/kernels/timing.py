"""Times on the device: medians over replays of a CUDA graph, without launch overhead.

If the data of one call fits into the L2 cache, pass several calls with different data: they are captured one
after the other, and the time is per call.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

BANDWIDTH = 4.3e12
"""Bytes per second of a large copy on an H200, read and written."""

FLOPS = 790e12
"""bf16 operations per second of an 8192³ matmul on an H200, random data."""


RESERVED = 64 << 30
"""Bytes reserved by torch's allocator above which its cache is emptied after each graph."""


class Row(NamedTuple):
    """One line of the table. `bytes` and `flops` are the minimum that the operation must move and compute."""

    name: str
    case: str
    us: float
    bytes: float = 0.0
    flops: float = 0.0
    target: str = ""

    @property
    def bound(self) -> float:
        """The minimum time by both peaks, µs."""
        return 1e6 * max(self.bytes / BANDWIDTH, self.flops / FLOPS)

    def line(self) -> str:
        """A line to print: time, rate, share of the limiting peak."""
        by_flops = self.flops / FLOPS > self.bytes / BANDWIDTH
        rate = (
            f"{self.flops / self.us / 1e6:7.0f} TFLOP/s"
            if by_flops
            else f"{self.bytes / self.us / 1e6:7.2f} TB/s   "
        )
        share = self.bound / self.us
        return f"{self.name:22} {self.case:30} {self.us:9.1f} us {rate} {share:6.1%} of peak  {self.target}"


_cuda: Any = torch.cuda  # parts of it are untyped


def _stream() -> Any:
    return _cuda.Stream()


def _event() -> Any:
    return _cuda.Event(enable_timing=True)


class Captured(NamedTuple):
    """A graph and the outputs of its calls, which each replay overwrites."""

    graph: torch.cuda.CUDAGraph
    results: list[Any]


def capture(calls: Sequence[Callable[[], Any]]) -> Captured:
    """Capture the calls in one graph, after one warm-up of each."""
    stream = _stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call() for call in calls]
    return Captured(graph, results)


def microseconds(calls: Sequence[Callable[[], Any]], replays: int = 15, least: int = 10) -> float:
    """Median time per call. Calls are repeated until the graph holds at least `least` of them."""
    rounds = -(-least // len(calls))
    graph = capture([*calls] * rounds).graph
    marks = [_event() for _ in range(replays + 1)]
    graph.replay()
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    if torch.cuda.memory_reserved() > RESERVED:
        del graph  # returns its memory to the allocator, which keeps it
        torch.cuda.empty_cache()
    spans: list[float] = [a.elapsed_time(b) for a, b in pairwise(marks)]
    return statistics.median(spans) * 1e3 / (rounds * len(calls))
