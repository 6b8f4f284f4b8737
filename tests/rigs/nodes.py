"""Nodes that are threads of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TypeVar

from bench.chaos.tiny import free_port
from core.config import ParallelConfig
from gpu.executor import LocalExecutor
from gpu.nodes.follow import Follower
from gpu.nodes.join import Nodes, join
from tests.rigs.wait import PATIENCE

T = TypeVar("T")


def parallels(tp: int, nnodes: int, port: int = 0) -> list[ParallelConfig]:
    """The settings of each node."""
    place = f"127.0.0.1:{port or free_port()}"
    return [
        ParallelConfig(tp=tp, nnodes=nnodes, node_rank=node, dist_init_addr=place) for node in range(nnodes)
    ]


def at_once(works: Sequence[Callable[[], T]]) -> list[Future[T]]:
    """Each in a thread of its own, ended."""
    with ThreadPoolExecutor(len(works)) as pool:
        started = [pool.submit(work) for work in works]
        assert not wait(started, PATIENCE).not_done
        return started


def joined(tp: int, nnodes: int) -> list[Nodes]:
    """Nodes that have found each other."""
    works = [lambda each=each: join(each, {}) for each in parallels(tp, nnodes)]
    return [each.result() for each in at_once(works)]


class Pair:
    """The executor of node 0 as `first`, and node 1 in a thread."""

    def __init__(self, build: Callable[[Nodes], LocalExecutor], tp: int) -> None:
        self.nodes = joined(tp, 2)
        built = at_once([partial(build, each) for each in self.nodes])
        self.first, self.second = (each.result() for each in built)

    def start(self) -> None:
        """Node 1 prepares from now on, and runs until node 0's executor is closed."""
        pool = ThreadPoolExecutor(1)
        self.ended = pool.submit(Follower(self.second, self.nodes[1].channels[0]).run)
        pool.shutdown(wait=False)
