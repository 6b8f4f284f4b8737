"""Plots of a run: latency distributions, and throughput over time."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bench.load.records import Record
from bench.load.report import samples


def draw(path: Path, runs: list[tuple[str, list[Record]]], title: str) -> bool:
    """Write a PNG with one line per run (name, records). False when matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    FigureCanvasAgg(figure)  # no display, no global state
    first, gaps, speed = figure.subplots(1, 3)
    for name, records in runs:
        good = [record for record in records if record.bad is None]
        for axes, kind in ((first, "ttft"), (gaps, "itl")):
            values = np.sort(samples(good, kind)) * 1000
            if len(values):
                axes.plot(values, np.arange(1, len(values) + 1) / len(values), label=name)
        seconds, rate = throughput(good)
        if len(seconds):
            speed.plot(seconds, rate, label=name)
    for axes, words in ((first, "time to first token, ms"), (gaps, "time between token events, ms")):
        axes.set(xlabel=words, ylabel="share of samples", xscale="log", ylim=(0, 1.01))
    speed.set(xlabel="seconds since the first send", ylabel="token events per second", ylim=(0, None))
    for axes in (first, gaps, speed):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    return True


def throughput(records: list[Record], points: int = 100) -> tuple[list[float], list[float]]:
    """Token events per second in `points` equal bins: (bin centres in s, rates)."""
    if not any(record.times for record in records):
        return [], []
    start = min(record.sent for record in records)
    moments = np.concatenate([record.times for record in records]) - start
    counts, edges = np.histogram(moments, bins=points, range=(0.0, float(moments.max()) or 1.0))
    width = float(edges[1] - edges[0])
    return ((edges[:-1] + edges[1:]) / 2).tolist(), (counts / width).tolist()
