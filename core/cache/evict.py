"""Which cached pages are evicted first: functions from a leaf to its key; the smallest goes first.

A node's rank may only grow while it lives. The tree's queue relies on it: an entry whose rank has become
too small is queued again when it comes up, so a match need not touch the queue. All
fields below only grow (`created` never changes, `priority` is only ever raised).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from core.cache.node import RadixNode
from core.config import Eviction

EvictionKey = Callable[[RadixNode], int]

ACCESS_BITS = 64
"""Of the lower part of a rank of two. One integer: at tuples the garbage collector has to look."""


def lru(node: RadixNode) -> int:
    """Longest unused first."""
    return node.last_access


def lfu(node: RadixNode) -> int:
    """Fewest admissions first, then longest unused."""
    return (node.hits << ACCESS_BITS) + node.last_access


def fifo(node: RadixNode) -> int:
    """Oldest first, used or not."""
    return node.created


def priority(node: RadixNode) -> int:
    """Least important first, then longest unused."""
    return (node.priority << ACCESS_BITS) + node.last_access


EVICTION_KEYS: Mapping[Eviction, EvictionKey] = {"lru": lru, "lfu": lfu, "fifo": fifo, "priority": priority}
