"""Traces the kernels of the device: order and time."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch


class KernelTime(NamedTuple):
    """A kernel and the one before it, which distinguishes GEMMs of the same name at different places.

    `us_per_step` is the time that it adds: from the end of all earlier kernels, or its own start if later, to
    its end. The plain duration of a kernel with dependent launch also contains its wait for the one before.
    """

    name: str
    before: str
    per_step: float
    us_each: float
    us_per_step: float


class KernelTrace:
    """Records all kernels of the process between construction and `stop`."""

    def __init__(self) -> None:
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._profile.start()

    def stop(self, steps: int) -> tuple[list[KernelTime], float]:
        """Kernels of `steps` steps, slowest first, and the share of the time in which any ran."""
        self._profile.stop()
        inner: Any = self._profile.profiler
        events = sorted(
            (event.start_ns(), event.end_ns(), short(event.name()))
            for event in inner.kineto_results.events()
            if "CUDA" in str(event.device_type())
        )
        if not events or not steps:
            return [], 0.0
        spent: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
        reached, before, busy = events[0][0], "", 0.0
        for start, end, name in events:
            alone = max(end - max(start, reached), 0)
            found = spent[name, before]
            found[0] += 1
            found[1] += alone
            busy += alone
            reached, before = max(reached, end), name
        times = [
            KernelTime(
                name,
                before,
                round(count / steps, 2),
                round(ns / count / 1e3, 2),
                round(ns / steps / 1e3, 1),
            )
            for (name, before), (count, ns) in spent.items()
        ]
        times.sort(key=lambda each: -each.us_per_step)
        return times, busy / (reached - events[0][0])


def short(name: str) -> str:
    """A kernel's name without templates and arguments."""
    name = name.removeprefix("void ").split("<")[0].split("(")[0]
    return name.rsplit("::", 1)[-1][:48]
