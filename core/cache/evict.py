"""Which cached pages go first: orders as functions from a leaf to its rank, smallest first.

A node's rank may only grow while it lives. The tree's queue relies on it: an entry that has become
too small is found when it comes up and is filed again, so a match need not touch the queue. All
fields below only grow (`created` never changes, `priority` is only ever raised).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from core.cache.node import RadixNode
from core.config.groups import Eviction

Rank = tuple[int, ...]
Order = Callable[[RadixNode], Rank]


def lru(node: RadixNode) -> Rank:
    """Longest unused first."""
    return (node.last_access,)


def lfu(node: RadixNode) -> Rank:
    """Fewest admissions first, then longest unused."""
    return (node.hits, node.last_access)


def fifo(node: RadixNode) -> Rank:
    """Oldest first, used or not."""
    return (node.created,)


def priority(node: RadixNode) -> Rank:
    """Least important first, then longest unused."""
    return (node.priority, node.last_access)


ORDERS: Mapping[Eviction, Order] = {"lru": lru, "lfu": lfu, "fifo": fifo, "priority": priority}
