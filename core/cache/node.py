"""A node of the radix tree, with the pages along its edge: fields and split, no policy."""

from __future__ import annotations

import msgspec
import numpy as np

from core.types import Ints, RootKey, frozen

NO_PAGES: Ints = frozen(np.zeros(0, np.int32))

LOWEST = -(2**63)
"""Lowest priority of all: a node has it until it is promoted."""

Edge = bytes | RootKey
"""The key of a node at its parent: the first page of its key, or a root's name."""


class RadixNode(msgspec.Struct, eq=False, gc=False):
    """A run of whole pages whose prefix is spelled by the nodes above it.

    Owner: event loop, through `RadixTree`. `pages` is never written in place. `locks` counts the
    holds at this node or below it. A node that was dropped from the tree has no parent.

    The garbage collector does not look at nodes: a walk of 60,000 took 0.2 s of an idle loop. It has nothing
    to find there, because a node that is dropped leaves its parent's `children` and so every cycle.
    """

    parent: RadixNode | None
    edge: Edge
    key: bytes
    pages: Ints
    created: int
    last_access: int
    children: dict[Edge, RadixNode] = msgspec.field(default_factory=dict)
    locks: int = 0
    hits: int = 0
    """Admissions that stood on this node."""
    priority: int = LOWEST
    pins: dict[str, int] | None = None
    """Number of pins at this node or below it, by owner; None without any."""
    checkpoint: int = 0
    """The number of a saved state of linear attention behind this node's last token; 0: none."""
    queued: bool = False
    """The tree's eviction queue has an entry for this node."""

    def path(self) -> list[RadixNode]:
        """This node and all above it."""
        nodes: list[RadixNode] = []
        node: RadixNode | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes

    def split(self, num_pages: int) -> RadixNode:
        """Cut after the first `num_pages` pages; return the new node, which takes them.

        This object keeps the suffix, because holds refer to it and a hold's node must go on
        ending where it ended: were it to become the prefix, releasing the hold would leave the
        suffix locked for ever.

            parent ── [ A A A B B ]      parent ── new [ A A A ] ── self [ B B ]
        """
        step = len(self.key) // len(self.pages)
        cut = num_pages * step
        # The halves are copies: a slice would keep the whole array alive after one half is evicted.
        prefix = RadixNode(
            self.parent,
            self.edge,
            self.key[:cut],
            self.pages[:num_pages].copy(),
            self.created,
            self.last_access,
        )
        prefix.locks = self.locks
        prefix.hits = self.hits
        prefix.priority = self.priority
        prefix.pins = None if self.pins is None else dict(self.pins)
        if self.parent is not None:
            self.parent.children[self.edge] = prefix
        self.key = self.key[cut:]
        self.pages = self.pages[num_pages:].copy()
        self.edge = self.key[:step]
        self.parent = prefix
        prefix.children[self.edge] = self
        return prefix
