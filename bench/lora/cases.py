"""Cases to measure, the most important first."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import numpy as np

from bench.load.workloads import SCENARIOS, Workload

CHURN = "churn"
"""The kind in which adapters come and go."""

ZIPF = 1.0
"""Exponent of adapters' popularity: the k-th most popular is asked for in proportion to k to the power of
-ZIPF."""


class Setup(NamedTuple):
    """A model with random weights, and a number of different adapter files. Not `together`: two such servers
    do not fit into the memory of one GPU."""

    model: str
    files: int
    together: bool = True


SETUPS: Mapping[str, Setup] = MappingProxyType(
    {
        "8b": Setup("configs/models/qwen3-8b", 8),
        "30b": Setup("configs/models/qwen3-30b-a3b", 1, together=False),
    }
)

KINDS: Mapping[str, int] = MappingProxyType({"8mixed": 8, "one": 1, "base": 0, "zipf": 64, CHURN: 8})
"""Adapters that requests have; `8mixed` in turn, `zipf` by popularity."""


class Load(NamedTuple):
    """Requests, of which `running` run at once and the others are queued; 0: all run."""

    work: Workload
    running: int = 0

    @property
    def rows(self) -> int:
        """Requests that run at once."""
        return self.running or self.work.concurrency


C32 = SCENARIOS["c32"]
C128 = msgspec.structs.replace(C32, name="c128", input_len=512, output_len=128, concurrency=128, requests=256)
LOADS: Mapping[str, Load] = MappingProxyType(
    {
        "c32": Load(C32),
        "c128": Load(C128),
        "q512": Load(msgspec.structs.replace(C128, name="q512", concurrency=512, requests=1024), 128),
        "q1024": Load(msgspec.structs.replace(C128, name="q1024", concurrency=1024, requests=3072), 128),
    }
)
"""The loads of the LoRA table that servers are compared by, and two with queues: 64 adapters can fill 8
places only if enough requests wait for each. The name goes into the seed of prompts."""


class Case(NamedTuple):
    """One row of the results."""

    setup: str
    load: str
    kind: str

    @property
    def name(self) -> str:
        """The name of the case in results and --cases."""
        first = "" if self.setup == "8b" else f"{self.setup}-"
        if self.kind in ("zipf", CHURN):
            return f"{first}{self.kind}-{self.load}"
        return f"{first}{self.load}-{self.kind}"

    @property
    def adapters(self) -> int:
        """Number of adapters that requests may have."""
        return KINDS[self.kind]


ALL = (
    *(Case("8b", load, kind) for load in ("c32", "c128") for kind in ("8mixed", "one", "base", "zipf")),
    *(Case("8b", load, "zipf") for load in ("q512", "q1024")),
    Case("8b", "c32", CHURN),
    *(Case("30b", load, kind) for load in ("c32", "c128") for kind in ("8mixed", "one", "base")),
)


def picks(case: Case, first: int, count: int) -> list[int]:
    """Numbers of the adapters that the requests from number `first` on have."""
    if case.kind != "zipf":
        return [(first + number) % case.adapters for number in range(count)]
    weights = np.arange(1, case.adapters + 1) ** -ZIPF
    found: list[int] = (
        np.random.default_rng(first).choice(case.adapters, count, p=weights / weights.sum()).tolist()
    )
    return found
