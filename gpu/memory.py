"""Bytes to pages: what fits, decided before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from core.config import CacheConfig
from core.errors import ConfigError
from core.models import ModelSpec
from gpu.kv.pool import KvPool

GIB = 2**30

CPU_FRACTION = 0.3
CPU_POOL_LIMIT = 4 * GIB
"""A CPU's memory belongs to others too, and a guess this size already holds 93,000 tokens of the
default model. Who wants more says --mem-fraction or --kv-tokens."""

SHORTEST_CONTEXT = 512
"""Tokens of the shortest pool that is chosen by itself: one chat turn. An explicit --kv-tokens may
be smaller."""


class MemoryPlan(NamedTuple):
    """What goes where, in bytes; `num_pages` includes the dump page 0."""

    available: int
    weights: int
    page_bytes: int
    num_pages: int
    page_size: int

    @property
    def pool(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def tokens(self) -> int:
        """Tokens the usable pages hold."""
        return (self.num_pages - 1) * self.page_size


def available_bytes(proc: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that can be taken without swapping: the machine's, or the container's where less."""
    free = _machine_bytes(proc)
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else min(free, max(int(limit) - int(stat.get("anon", 0)), 0))


def _machine_bytes(proc: Path) -> int:
    try:
        for line in proc.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def plan_memory(
    spec: ModelSpec, dtype: torch.dtype, cache: CacheConfig, available: int, most_tokens: int
) -> MemoryPlan:
    """Weights first, then as many pages as allowed, at most for `most_tokens`.

    Raises `ConfigError` with need, have and the flag to change.
    """
    parameters = spec.num_parameters()
    if spec.tied and dtype == torch.float32:
        parameters += spec.vocab_size * spec.hidden  # the packed head is a copy (`Decoder.seal`)
    weights = parameters * dtype.itemsize
    if weights > available:
        raise ConfigError(
            f"Not enough memory: the weights ({parameters / 1e6:,.1f}M parameters in "
            f"{_name(dtype)}) need {_gib(weights)}, {_gib(available)} is free. "
            "Use a smaller --model" + (" or --dtype bfloat16." if dtype.itemsize > 2 else ".")
        )
    size = cache.page_size
    page_bytes = KvPool.page_bytes(spec.layers, size, (spec.kv_heads, spec.head_dim), dtype)
    left = available - weights
    if cache.kv_tokens:
        pages = -(-cache.kv_tokens // size) + 1
        if pages * page_bytes > left:
            raise ConfigError(
                f"Not enough memory: --kv-tokens {cache.kv_tokens} needs {_gib(pages * page_bytes)} "
                f"beside the weights, {_gib(left)} is left. Lower --kv-tokens."
            )
        return MemoryPlan(available, weights, page_bytes, pages, size)
    if cache.mem_fraction:
        budget = int(left * cache.mem_fraction)
    else:
        budget = min(int(left * CPU_FRACTION), CPU_POOL_LIMIT)
    pages = min(budget // page_bytes, -(-most_tokens // size) + 1)
    least = -(-min(SHORTEST_CONTEXT, spec.context_length, most_tokens) // size) + 1
    if pages < least:
        raise ConfigError(
            f"Not enough memory: the KV pool needs at least {_gib(least * page_bytes)}, "
            f"{_gib(budget)} of the {_gib(left)} left beside the weights is set aside for it. "
            "Raise --mem-fraction, free memory, or use a smaller --model."
        )
    return MemoryPlan(available, weights, page_bytes, pages, size)


def memory_table(plan: MemoryPlan) -> Sequence[str]:
    """Lines for the log."""
    rows = [
        ("free before loading", plan.available, ""),
        ("weights", plan.weights, ""),
        (
            "KV pool",
            plan.pool,
            f"{plan.num_pages} pages of {plan.page_size}: {plan.tokens:,} tokens",
        ),
        ("left", plan.available - plan.weights - plan.pool, ""),
    ]
    return [f"{what:<20} {_gib(size):>10}  {note}".rstrip() for what, size, note in rows]


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB // 8 else f"{size / 2**20:.1f} MiB"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
