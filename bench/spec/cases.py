"""Cases to measure, the most important first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

NGRAM, HEAD = "ngram", "head"
"""Setups with a model that was named by a flag, and its own answers."""


class Setup(NamedTuple):
    """A target with random weights and the shape of its head. Not `together`: two such servers do not fit
    into the memory of one GPU."""

    model: str
    head: str
    together: bool = True


SETUPS: Mapping[str, Setup] = MappingProxyType(
    {
        "8b": Setup("configs/models/qwen3-8b", "configs/models/qwen3-8b-eagle3"),
        "30b": Setup("configs/models/qwen3-30b-a3b", "configs/models/qwen3-30b-a3b-eagle3", False),
    }
)

DATA: Mapping[str, str] = MappingProxyType(
    {"specbench": "spec_bench_question.jsonl", "mtbench": "mt_bench_question.jsonl"}
)
"""Files under --data."""


class Case(NamedTuple):
    """`clients` streams at once.

    accept, then  simulated tokens of a step, in the first and in the second half of an answer; 0: the drafts
                  are judged by what is sampled
    data          of `DATA`; empty: random tokens, which only the setups with random weights get
    """

    setup: str
    clients: int
    accept: float = 0.0
    then: float = 0.0
    temperature: float = 0.0
    data: str = ""

    @property
    def name(self) -> str:
        """The name of the case in results and --cases."""
        what = self.data or f"accept{self.accept:g}"
        if self.then != self.accept:
            what += f"to{self.then:g}"
        return f"{self.setup}-{what}-c{self.clients}" + f"-t{self.temperature:g}" * (self.temperature > 0)


def every() -> Iterator[Case]:
    """All cases."""
    for temperature in (0.0, 1.0):
        for setup, high, low in (
            ("8b", (1, 32, 256), (1, 256, 64, 16, 4, 128)),
            ("30b", (32, 128, 1, 8), (1, 8, 32, 128)),
        ):
            yield from (Case(setup, clients, 3.0, 3.0, temperature) for clients in high)
            yield from (Case(setup, clients, 1.0, 1.0, temperature) for clients in low)
            if setup == "8b":
                yield from (Case(setup, clients, 3.0, 1.0, temperature) for clients in (32, 1, 256))
    for setup in (HEAD, NGRAM):
        for data in DATA:
            yield from (Case(setup, clients, data=data) for clients in (1, 32, 8, 64))


def by_setup(cases: Iterable[Case]) -> dict[str, list[Case]]:
    """Cases that share their servers, in order."""
    found: dict[str, list[Case]] = {}
    for case in cases:
        found.setdefault(case.setup, []).append(case)
    return found
