"""What ranks exchange within a step.

Each rank runs the same calls in the same order, on a launch thread of its own. Here they are threads on a
CPU. GPUs of one host launch kernels instead (`gpu.peers`) and decide here what the host decides for all.
Ranks of several processes are in `gpu.nodes`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from core.clock import monotonic
from core.errors import EngineFailed
from gpu.shard import Shard

T = TypeVar("T")


class RankGroup:
    """Ranks that are threads of this process. Owner: their launch threads; `abort` from any."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._met = threading.Barrier(ranks)
        # Two rows in turn: a rank that is ahead gives for the next exchange while others still read.
        self._given: list[list[Any]] = [[None] * ranks for _ in range(2)]
        self._reason = ""

    def exchange(self, rank: int, turn: int, value: Any) -> list[Any]:
        """What every rank has given at its `turn`, counted from 0, once all have. Raises `EngineFailed` at
        once when the group is aborted."""
        given = self._given[turn % 2]
        given[rank] = value
        try:
            self._met.wait()
        except threading.BrokenBarrierError as broken:
            raise EngineFailed(f"another rank has ended: {self._reason}") from broken
        return list(given)

    def abort(self, reason: str) -> None:
        """End the waits of all ranks, also those to come."""
        self._reason = self._reason or reason
        self._met.abort()


class Rank:
    """One rank of a group, and its way to the others. All ranks get equal bits: sampling relies on it. A
    tensor that was given stays as it is until the rank's next call has returned. Owner: its launch thread."""

    def __init__(self, group: RankGroup, number: int) -> None:
        self.shard = Shard(number, group.ranks)
        self._group = group
        self._turn = 0

    def reduce_sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts of one shape, in the order of ranks: a new tensor in their dtype."""
        first, *others = self._exchange(part)
        # float32 whatever the dtype: one rounding, as in a product that one rank computes.
        total: Tensor = first.float() + others[0]
        for other in others[1:]:
            total += other
        return total.to(part.dtype)

    def gather(self, part: Tensor) -> Tensor:
        """All ranks' parts [n, size] beside each other, in the order of ranks: a new [n, ranks * size]."""
        return torch.cat(tuple(self._exchange(part)), dim=-1)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """While launches are prepared: a rank waits for no other. Nothing to do on a CPU."""
        yield

    def first(self, make: Callable[[], T], kind: type[T]) -> T:
        """What rank 0 makes, for all ranks. Where it raises, so do the others. `kind` is the type of it,
        for ranks of another process."""
        if self.shard.rank:
            made: tuple[T, ...] = self._exchange(None)[0]
        else:
            made = ()
            try:
                made = (make(),)
            finally:
                self._exchange(made)
        if not made:
            raise RuntimeError("rank 0 has failed at what it does for all ranks")
        return made[0]

    def late(self, deadline: float) -> bool:
        """Whether a point of the monotonic clock, in seconds, has passed for rank 0."""
        return self.first(lambda: monotonic() > deadline, bool)

    def _exchange(self, value: Any) -> Sequence[Any]:
        turn = self._turn
        self._turn += 1
        return self._group.exchange(self.shard.rank, turn, value)


def make_ranks(count: int) -> tuple[RankGroup, list[Rank]]:
    """A group of so many ranks."""
    group = RankGroup(count)
    return group, [Rank(group, number) for number in range(count)]
