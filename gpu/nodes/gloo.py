"""Ranks on CPUs that are in several processes: they exchange by gloo, each a member of one process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, Work

from core.errors import EngineFailed
from gpu.nodes.join import Nodes
from gpu.nodes.wire import pack, unpack
from gpu.ranks import Rank, RankGroup

T = TypeVar("T")

GLOO: Any = ProcessGroupGloo
"""The members of a group are made one by one: torch's default group is one a process. Its type stubs lack the
methods of this class."""

LOOK = timedelta(seconds=0.1)
"""Between two looks of a rank that waits at whether its group has ended: gloo cannot be interrupted."""
MOST = timedelta(hours=1)
"""The longest time of one exchange. Ranks that hang are noticed by the step they are in, long before."""
RAISED = -1
"""Sent in place of a size: rank 0 has nothing to give."""


class NodeGroup(RankGroup):
    """The ranks of this process, of those in several. Owner: their launch threads; `abort` from any."""

    def __init__(self, nodes: Nodes) -> None:
        super().__init__(nodes.parallel.tp)
        self._nodes = nodes  # whose store the members were made of
        self._ended = False

    def check(self) -> None:
        """Raise `EngineFailed` after `abort`."""
        if self._ended:
            raise EngineFailed(f"another rank has ended: {self._reason}")

    def abort(self, reason: str) -> None:
        """See `RankGroup.abort`: those of this process. Others notice when it ends."""
        super().abort(reason)
        self._ended = True


class GlooRank(Rank):
    """One of them. Owner: its launch thread."""

    def __init__(self, group: NodeGroup, number: int, member: Any) -> None:
        """`member` is a `ProcessGroupGloo`."""
        super().__init__(group, number)
        self._nodes, self.member = group, member
        self._from_first = BroadcastOptions()
        self._from_first.rootRank = 0

    def first(self, make: Callable[[], T], kind: type[T]) -> T:
        """See `Rank.first`."""
        size = torch.tensor([RAISED])
        if self.shard.rank:
            self._broadcast(size)
            if size == RAISED:
                raise RuntimeError("rank 0 has failed at what it does for all ranks")
            data = bytearray(int(size))
            self._broadcast(torch.frombuffer(data, dtype=torch.uint8))
            return unpack(data, kind)
        try:
            made = make()
            data = bytearray(pack(made))
            size = torch.tensor([len(data)])
        finally:
            self._broadcast(size)
        self._broadcast(torch.frombuffer(data, dtype=torch.uint8))
        return made

    def _exchange(self, value: Any) -> Sequence[Any]:
        """Exchange tensors of one shape."""
        part = value.contiguous()
        own = part.view(torch.uint8)  # gloo has no sum in float32 of other types, so it only carries bytes
        found = [torch.empty_like(own) for _ in range(self.shard.ranks)]
        self._wait(self.member.allgather([found], [own]))
        return [each.view(part.dtype) for each in found]

    def _broadcast(self, data: Tensor) -> None:
        self._wait(self.member.broadcast([data], self._from_first))

    def _wait(self, work: Work) -> None:
        """Wait for a collective to finish. Raises `EngineFailed` if another process has exited or the group
        was aborted."""
        while not work.is_completed():
            self._nodes.check()
            with suppress(RuntimeError):  # not yet, or never: see below
                work.wait(LOOK)
        try:
            work.wait()
        except RuntimeError as error:
            raise EngineFailed(f"another rank has ended: {error}") from error


def gloo_ranks(nodes: Nodes) -> tuple[NodeGroup, Sequence[GlooRank]]:
    """The ranks of this process. Blocks until those of all are connected. Raises `EngineFailed` where one
    does not come."""
    group, ranks = NodeGroup(nodes), nodes.ranks
    with ThreadPoolExecutor(len(ranks), "loom-gloo") as pool:
        members = list(pool.map(partial(_member, nodes), ranks))
    return group, [GlooRank(group, *each) for each in zip(ranks, members, strict=True)]


def _member(nodes: Nodes, rank: int) -> Any:
    options: Any = GLOO._Options()
    # One address, where gloo would take that of the host's name.
    options._devices = [GLOO.create_device(hostname=nodes.local, lazy_init=False)]
    options._timeout = MOST
    try:
        return GLOO(PrefixStore("gloo", nodes.store()), rank, nodes.parallel.tp, options)
    except RuntimeError as error:
        raise EngineFailed(f"rank {rank} did not meet the others: {error}") from error
