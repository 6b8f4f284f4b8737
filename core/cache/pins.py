"""Prefixes that clients want kept for a while: soft holds, dropped before any request waits for pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from heapq import merge

import msgspec

from core.cache.node import RadixNode
from core.cache.pages import IntegrityError
from core.cache.radix import RadixTree

OWNER_SHARE = 0.5
"""Share of the pinnable pages that one owner may pin: one owner cannot evict all pins of
others, and a single one still gets most of what its conversations need."""

MAX_PINS = 2048
"""Pins of different owners may stand on the same pages, so pages do not bound their number."""

Key = tuple[str, RadixNode, float]
"""Identity of a pin: its owner, the node that ends the prefix, and its seconds."""


class Pin(msgspec.Struct, eq=False):
    """A pin: one prefix under one owner. `used` counts uses of all pins, `expires` is on the caller's
    clock."""

    key: Key
    expires: float = 0.0
    used: int = 0


class Pins:
    """All pins, least recently used first.

    A pin counts at its node and at all above it, as a lock does, so its whole prefix stays while it
    lives. Unlike a lock it is dropped when its time is over, when its owner or all owners together
    have pinned more than their share, and when pages are needed that nothing else can give.

    Owner: event loop, through `CacheManager`.
    """

    def __init__(self, tree: RadixTree, limit: int) -> None:
        """`limit`: pages that may be pinned."""
        self._tree = tree
        self.limit = limit
        self.owner_limit = int(limit * OWNER_SHARE)
        self.count = 0
        # A pin that is used again goes to the end of both. Pins of equal seconds expire in the order
        # of their use, so the first of each line is the first to expire.
        self._lines: dict[float, dict[Key, Pin]] = {}
        self._owners: dict[str, dict[Key, Pin]] = {}
        self._usage: Counter[str] = Counter()
        """Pages under the pins of each owner, shared ones once."""
        self._uses = 0

    def add(self, owner: str, node: RadixNode, seconds: float, now: float) -> None:
        """Pin the prefix that ends with `node`, at most `owner_limit` pages, for `seconds` from now; one
        that is pinned already gets the time anew. Drops the owner's, then anybody's oldest pins where
        there are too many."""
        key = (owner, node, seconds)
        pin = self._leave(key)
        if pin is None:
            pin = Pin(key)
            self._usage[owner] += self._tree.pin(node, owner)
            self.count += 1
        self._uses += 1
        pin.used, pin.expires = self._uses, now + seconds
        self._lines.setdefault(seconds, {})[key] = pin
        self._owners.setdefault(owner, {})[key] = pin
        self._supersede(key)
        while self._usage[owner] > self.owner_limit:
            self._drop(next(iter(self._owners[owner].values())))
        while self._tree.pinned > self.limit or self.count > MAX_PINS:
            self._drop(min((next(iter(line.values())) for line in self._lines.values()), key=_used))

    def expire(self, now: float) -> None:
        """Drop the pins whose time is over. O(1) when there is none."""
        for line in list(self._lines.values()):
            while line and (pin := next(iter(line.values()))).expires <= now:
                self._drop(pin)

    def give_way(self) -> Iterator[bool]:
        """Drop the pins that no running request stands on, the least recently used first; yields True
        whenever pages came free of all pins. Of a prefix under a request nothing can be evicted: its pin
        would go for nothing. All pins are looked at once, however often it is resumed."""
        for pin in merge(*(list(line.values()) for line in self._lines.values()), key=_used):
            pinned = self._tree.pinned
            if not pin.key[1].locks:
                self._drop(pin)
            if self._tree.pinned < pinned:
                yield True

    def _supersede(self, key: Key) -> None:
        """A longer prefix of the same owner for as long makes shorter ones of it needless: without this
        every turn of a conversation would leave a pin behind."""
        owner, node, seconds = key
        line = self._lines[seconds]
        for above in node.path()[1:]:
            if (shorter := line.get((owner, above, seconds))) is not None:
                self._drop(shorter)

    def _drop(self, pin: Pin) -> None:
        self._leave(pin.key)
        owner, node, _ = pin.key
        self._usage[owner] -= self._tree.unpin(node, owner)
        if not self._usage[owner]:
            del self._usage[owner]
        self.count -= 1

    def _leave(self, key: Key) -> Pin | None:
        owner, _, seconds = key
        line = self._lines.get(seconds, {})
        pin = line.pop(key, None)
        if pin is not None:
            del self._owners[owner][key]
            if not self._owners[owner]:
                del self._owners[owner]
            if not line:
                del self._lines[seconds]
        return pin

    def check(self, nodes: list[RadixNode]) -> None:
        """Raise `IntegrityError` unless nodes, owners and counters say the same. `nodes`: all there are."""
        pins = [pin for line in self._lines.values() for pin in line.values()]
        listed = {id(pin) for own in self._owners.values() for pin in own.values()}
        if listed != {id(pin) for pin in pins} or len(pins) != self.count:
            raise IntegrityError(f"{self.count} pins, {len(pins)} in line, {len(listed)} with owners")
        self._check_nodes(pins, nodes)
        self._check_counts([node for node in nodes if node.pins])

    def _check_counts(self, nodes: list[RadixNode]) -> None:
        usage: Counter[str] = Counter()
        for node in nodes:
            usage.update(dict.fromkeys(node.pins or (), len(node.pages)))
        pinned = sum(len(node.pages) for node in nodes)
        if (self._tree.pinned, self._usage) != (pinned, usage):
            counted = (self._tree.pinned, dict(self._usage))
            raise IntegrityError(f"(pinned, usage) counted {counted}, are {(pinned, dict(usage))}")
        if pinned > self.limit or max(usage.values(), default=0) > self.owner_limit:
            raise IntegrityError(f"{pinned} pages are pinned, by owner {dict(usage)}: too many")

    def _check_nodes(self, pins: list[Pin], nodes: list[RadixNode]) -> None:
        """Every node counts the pins at and below it, and no others."""
        due: dict[int, Counter[str]] = {}
        for pin in pins:
            owner, node, _ = pin.key
            *path, top = node.path()
            for node in path:
                due.setdefault(id(node), Counter())[owner] += 1
            if top is not self._tree.top:
                raise IntegrityError("a pinned node is not in the tree")
        for node in nodes:
            if (node.pins or {}) != due.get(id(node), {}):
                raise IntegrityError(f"node with pages {node.pages.tolist()}: pins {node.pins} miscounted")


def _used(pin: Pin) -> int:
    return pin.used
