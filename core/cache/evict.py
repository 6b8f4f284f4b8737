"""Eviction orders of cached pages: functions from a leaf to its key; the smallest goes first.

A node's rank may only grow while it lives. The tree's queue relies on it: an entry whose rank has become
too small is queued again when it comes up, so a match need not touch the queue. All
fields below only grow (`created` never changes, `priority` is only ever raised).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from core.cache.node import RadixNode
from core.config import Eviction

EvictionKey = Callable[[RadixNode], int]

HIT = 8
"""Weight of a hit in look-ups. Of 8, 32 and 128, with hits counted up to 1, 3 or without end, this was the
only pair that lost nowhere."""

ACCESS_BITS = 64
"""Bits of the lower part of a two-part rank. A rank is one integer: tuples would be scanned by the garbage
collector."""


def lru(node: RadixNode) -> int:
    """Longest unused first."""
    return node.last_access


def lfu(node: RadixNode) -> int:
    """Least used first, where uses age: an admission keeps a node as long as `HIT` later look-ups do. Counts
    that did not age kept what was popular once, and lost up to 26 points of hits to `lru` where these win up
    to one (`bench.core.eviction`)."""
    return ((node.last_access + HIT * node.hits) << ACCESS_BITS) + node.last_access


def fifo(node: RadixNode) -> int:
    """Oldest first, used or not."""
    return node.created


def priority(node: RadixNode) -> int:
    """Least important first, then longest unused."""
    return (node.priority << ACCESS_BITS) + node.last_access


EVICTION_KEYS: Mapping[Eviction, EvictionKey] = {"lru": lru, "lfu": lfu, "fifo": fifo, "priority": priority}
