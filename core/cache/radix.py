"""The radix tree: prefixes as runs of pages, shared by all requests whose tokens begin alike.

    top ── root(adapter, salt) ── node ── node
       └── root(adapter, salt) ── node

Knows keys and pages; neither tokens nor the free list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush, heapreplace
from typing import NamedTuple

import msgspec
import numpy as np

from core.cache.checkpoints import Checkpoints
from core.cache.events import CacheEvents
from core.cache.evict import EvictionKey
from core.cache.key import WIDTH, common_tokens
from core.cache.node import NO_PAGES, Edge, RadixNode
from core.cache.pages import IntegrityError
from core.types import Ints, RootKey


class Prefix(NamedTuple):
    """How far a key reached into the tree when it was looked up. Nothing is locked, refreshed or split.

    `node` ends the part of the key that whole nodes spell, `edge` is the page that follows in the key (empty
    at its end), and `below` the child filed under it, of which the key spells a part; None: there is none.
    While these three agree, looking again would find the same.
    """

    node: RadixNode
    edge: Edge
    below: RadixNode | None
    tokens: int


class QueueEntry(msgspec.Struct, order=True, frozen=True, gc=False):
    """A node in the eviction queue. `number` is unique, so nodes of one rank are never compared. Nor does the
    garbage collector look at entries: as tuples, those of 60,000 nodes made two idle collections of 60 ms."""

    rank: int
    number: int
    node: RadixNode


class RadixTree:
    """Every cached page once, under its root's name and the tokens before it.

    Owner: event loop. `evictable` and `protected` count pages of unlocked and locked nodes; all
    pages below an unlocked node are evictable, since a lock counts at every node above it.

    `top` stands above all roots and is never dropped: a hold that has matched nothing locks it, so
    a root exists only while something is cached (or held) below it.
    """

    def __init__(self, page_size: int, eviction_key: EvictionKey, events: CacheEvents | None = None) -> None:
        self.top = RadixNode(None, b"", b"", NO_PAGES, 0, 0)
        self.evictable = 0
        self.protected = 0
        self.pinned = 0
        """Pages of nodes that somebody pins, locked or not."""
        self.nodes = 0
        """Nodes with pages: neither roots nor the top."""
        self._step = page_size * WIDTH
        self._eviction_key = eviction_key
        self._events = events
        self.checkpoints: Checkpoints | None = None
        """Checkpoints of nodes, if the model has linear attention."""
        self._now = 0
        # Every unlocked leaf without pins has one entry. Entries of nodes that were locked, pinned,
        # dropped or grew children since stay until they come up; `RadixNode.queued` keeps a node from
        # having two.
        self._queue: list[QueueEntry] = []
        self._pushes = 0

    # -- finding and adding

    def match(self, root: RootKey, key: bytes) -> RadixNode:
        """The node that ends the longest cached prefix of `key` (whole pages).

        Refreshes the path's access times and splits the last edge if the match ends inside it.
        """
        start = self.top.children.get(root)
        return self.top if start is None else self._descend(start, key)[0]

    def peek(self, root: RootKey, key: bytes) -> Prefix:
        """The longest cached prefix of `key` (whole pages), with the tree left as it is."""
        start = self.top.children.get(root)
        if start is None:
            return Prefix(self.top, root, None, 0)
        node, below, at = self._reach(start, key)
        spelled = at + (common_tokens(key, at, below.key) * WIDTH // self._step * self._step if below else 0)
        return Prefix(node, key[at : at + self._step], below, spelled // WIDTH)

    def is_current(self, prefix: Prefix) -> bool:
        """Whether `peek` would find it again. O(1)."""
        node = prefix.node
        return (node.parent is not None or node is self.top) and node.children.get(
            prefix.edge
        ) is prefix.below

    def insert(
        self, node: RadixNode, root: RootKey, key: bytes, pages: Sequence[int], priority: int
    ) -> tuple[RadixNode, int]:
        """Add `key` below `node` with its pages; those that are there already stay as they are. Returns the
        node that ends the key, and how many leading pages of it were there before.

        The caller has locked `node`, and this lock moves to the node that is returned. `node` is
        the top or lies below `root`. Priority is raised along the path.
        """
        start = node
        if node is self.top:
            start = node.children.get(root) or self._attach(node, root, b"", NO_PAGES)
        end, at = self._descend(start, key)
        found = at // self._step
        if at < len(key):
            end = self._attach(end, key[at : at + self._step], key[at:], np.array(pages[found:], np.int32))
            if self._events is not None:
                self._events.stored(root, end)
        self.promote(end, priority)
        self.lock(end, below=node)
        return end, found

    def pages(self, node: RadixNode) -> Ints:
        """Pages from the root down to and including `node`, int32, a copy."""
        parts = [each.pages for each in node.path()[:-1]]
        return np.concatenate(parts[::-1]) if parts else NO_PAGES

    def _descend(self, start: RadixNode, key: bytes) -> tuple[RadixNode, int]:
        """Deepest node below `start` that spells a prefix of `key`, and how many bytes it spells."""
        self._now += 1
        node, below, at = self._reach(start, key)
        if below is not None:
            node = below.split(common_tokens(key, at, below.key) * WIDTH // self._step)
            self.nodes += 1
            at += len(node.key)
        walk: RadixNode | None = node
        while walk is not start and walk is not None:
            walk.last_access = self._now
            walk = walk.parent
        return node, at

    def _reach(self, node: RadixNode, key: bytes) -> tuple[RadixNode, RadixNode | None, int]:
        """Deepest node below `node` that `key` spells whole, the child of which it spells a part, if any, and
        the bytes up to the node's end."""
        at = 0
        while True:
            child = node.children.get(key[at : at + self._step])
            if child is None or not key.startswith(child.key, at):
                return node, child, at
            node = child
            at += len(node.key)

    def _attach(self, parent: RadixNode, edge: bytes | RootKey, key: bytes, pages: Ints) -> RadixNode:
        node = parent.children[edge] = RadixNode(parent, edge, key, pages, self._now, self._now)
        self.evictable += len(pages)
        self.nodes += parent is not self.top
        return node

    # -- standing of nodes

    def lock(self, node: RadixNode, below: RadixNode | None = None) -> None:
        """Keep `node` and all above it: counted up to the top, or up to and without `below`."""
        if node.parent is None and node is not self.top:
            raise IntegrityError("lock of a node that was evicted: something ran between match and reserve")
        walk: RadixNode | None = node
        while walk is not below and walk is not None:
            if walk.locks == 0:
                self.evictable -= len(walk.pages)
                self.protected += len(walk.pages)
            walk.locks += 1
            walk = walk.parent

    def unlock(self, node: RadixNode, keep: bool = True) -> Ints:
        """Undo one `lock`; nodes without locks may be evicted from here on. Without `keep`
        unlocked leaves go at once: returns their pages, int32."""
        freed: list[Ints] = []
        for each in node.path():
            if each.locks == 0:
                raise IntegrityError("unlock of a node that is not locked")
            each.locks -= 1
            if each.locks == 0:
                self.evictable += len(each.pages)
                self.protected -= len(each.pages)
                if not keep and self._loose(each) and len(each.pages):
                    freed.append(each.pages)
                    self._drop(each)
                else:
                    self._settle(each)
        return np.concatenate(freed) if freed else NO_PAGES

    def cut(self, node: RadixNode, depth: int, num_pages: int) -> RadixNode:
        """The node at or above `node` that ends after `num_pages` pages from the root; split off where
        none does. `node` ends after `depth` >= `num_pages` > 0."""
        while depth - len(node.pages) >= num_pages:
            depth -= len(node.pages)
            assert node.parent is not None
            node = node.parent
        if depth == num_pages:
            return node
        self.nodes += 1
        return node.split(num_pages - depth + len(node.pages))

    def pin(self, node: RadixNode, owner: str) -> int:
        """Count a pin of `owner` at `node` and all above it; returns the pages it had not pinned yet."""
        fresh = 0
        for each in node.path()[:-1]:
            if each.pins is None:
                each.pins = {}
                self.pinned += len(each.pages)
            fresh += 0 if owner in each.pins else len(each.pages)
            each.pins[owner] = each.pins.get(owner, 0) + 1
        return fresh

    def unpin(self, node: RadixNode, owner: str) -> int:
        """Undo one `pin`; returns the pages that `owner` pins no more."""
        gone = 0
        for each in node.path()[:-1]:
            pins = each.pins
            if pins is None or owner not in pins:
                raise IntegrityError(f"unpin of a node that {owner!r} does not pin")
            pins[owner] -= 1
            if not pins[owner]:
                del pins[owner]
                gone += len(each.pages)
            if not pins:
                each.pins = None
                self.pinned -= len(each.pages)
                self._settle(each)
        return gone

    def credit(self, node: RadixNode) -> None:
        """Count one use of `node` and of all above it."""
        walk: RadixNode | None = node
        while walk is not None:
            walk.hits += 1
            walk = walk.parent

    def promote(self, node: RadixNode, priority: int) -> None:
        """Raise `node` and all above it to at least `priority`.

        No node ranks below its children, so the walk ends at the first that is high enough.
        """
        walk: RadixNode | None = node
        while walk is not None and walk.priority < priority:
            walk.priority = priority
            walk = walk.parent

    # -- eviction

    def evict(self, n: int) -> Ints:
        """Drop unlocked leaves without pins in order until at least `n` pages are free or none is
        left.

        Returns the pages dropped, int32. A parent that becomes an unlocked leaf is next in line
        by its own rank. Leaves go whole: one that is larger than asked leaves pages for the next
        call, which then finds them free; trimming leaves page by page would cost a queue entry
        for each page a decode takes.
        """
        freed: list[Ints] = []
        count = 0
        while count < n and self._queue:
            first = self._queue[0]
            node = first.node
            if node.locks or node.children or node.pins or node.parent is None:
                heappop(self._queue)
                node.queued = False
            elif (now := self._eviction_key(node)) != first.rank:
                self._pushes += 1
                heapreplace(self._queue, QueueEntry(now, self._pushes, node))
            else:
                heappop(self._queue)
                count += len(node.pages)
                freed.append(node.pages)
                self._drop(node)
        return np.concatenate(freed) if freed else NO_PAGES

    def _settle(self, node: RadixNode) -> None:
        """Queue `node` for eviction if it has become an unlocked leaf without pins. Remove an empty root at
        once."""
        if node.children or node.locks or node.pins or node is self.top:
            return
        if node.parent is self.top:
            del self.top.children[node.edge]
            node.parent = None
        elif not node.queued:
            self._pushes += 1
            heappush(self._queue, QueueEntry(self._eviction_key(node), self._pushes, node))
            node.queued = True

    def _drop(self, node: RadixNode) -> None:
        parent = node.parent
        if parent is None:
            raise IntegrityError("the eviction queue held a node that is not in the tree")
        del parent.children[node.edge]
        node.parent = None
        self.evictable -= len(node.pages)
        self.nodes -= 1
        if self._events is not None:
            self._events.removed(node.pages)
        if self.checkpoints is not None:
            self.checkpoints.drop(node)
        self._settle(parent)

    # -- looking (tests and integrity)

    def walk(self) -> Iterator[RadixNode]:
        """Every node, roots included and the top left out, parents before children."""
        stack = list(self.top.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _loose(self, node: RadixNode) -> bool:
        """Whether a node is a leaf with pages, without locks and pins."""
        return not (node.children or node.locks or node.pins or node.parent is self.top)

    def check_queue(self) -> None:
        """Raise `IntegrityError` unless every unlocked leaf without pins is queued once, at no rank
        above its own."""
        entries = {id(entry.node): entry.rank for entry in self._queue}
        if len(entries) != len(self._queue):
            raise IntegrityError("a node is twice in the eviction queue")
        for node in self.walk():
            if node.queued != (id(node) in entries):
                raise IntegrityError(f"node with pages {node.pages.tolist()}: queued flag and queue differ")
            if self._loose(node) and not node.queued:
                raise IntegrityError(f"unlocked leaf with pages {node.pages.tolist()} is not in line")
            if node.queued and entries[id(node)] > self._eviction_key(node):
                raise IntegrityError(f"the rank of the node with pages {node.pages.tolist()} fell")
            entries.pop(id(node), None)
        strays = [e for e in self._queue if id(e.node) in entries and e.node.parent is not None]
        if strays:
            raise IntegrityError(f"{len(strays)} queue entries for nodes that are not in the tree")
