"""Events of the prefix cache: the pages that it stored and removed, for routers that follow it."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

import msgspec
import numpy as np

from core.cache.node import RadixNode
from core.types import Ints, NDArray64, RootKey

HASH_BYTES = 8


class Stored(msgspec.Struct, frozen=True):
    """Pages that follow one another in a prefix were cached."""

    root: RootKey
    parent: int | None
    """Hash of the page before the first; None: the prefix begins here."""
    hashes: list[int]
    """Hash of the prefix up to the end of each page, 1 to 2**64 - 1."""
    tokens: NDArray64
    """[pages * page size]"""


class Removed(msgspec.Struct, frozen=True):
    """Pages were dropped: evicted, flushed, or of no more use to anybody."""

    hashes: list[int]


class Cleared(msgspec.Struct, frozen=True):
    """A flush has left nothing cached."""


CacheEvent = Stored | Removed | Cleared


class CacheEvents:
    """Collects the events of one cache, in order, until `take`.

    A page's hash covers its adapter (each time one is loaded it is another), the API key's namespace and all
    tokens up to the page's end. It is the same in every process, 8 bytes of BLAKE2b, as vLLM's are 8 bytes by
    default: enough for a router's guess, and no key of the tree itself, which compares tokens.

    Prefixes with a `cache_salt` or `extra_key` are not published, nor prompts of embeddings: a router that
    matches tokens would send requests without the salt there, which hit nothing, and a salt is meant to hide
    what is cached. Prefixes of an API key are published.

    Owner: event loop. Stored pages cost it about a microsecond each.
    """

    def __init__(self, num_pages: int) -> None:
        # By page id. 0: not cached, or not published.
        self._hashes = np.zeros(num_pages, np.uint64)
        self._pending: list[CacheEvent] = []
        self.on_first: Callable[[], None] = lambda: None
        """Called with the first event after `take`."""

    def take(self) -> list[CacheEvent]:
        """Events since the last call."""
        events, self._pending = self._pending, []
        return events

    def stored(self, root: RootKey, node: RadixNode) -> None:
        """`node` was added to the tree, below its parent."""
        if root.salt or root.own:
            return
        above = node.parent
        parent = int(self._hashes[above.pages[-1]]) if above is not None and len(above.pages) else None
        width = len(node.key) // len(node.pages)
        state = _seed(root) if parent is None else parent
        hashes: list[int] = []
        for at in range(0, len(node.key), width):
            state = _digest(state.to_bytes(HASH_BYTES, "big") + node.key[at : at + width])
            hashes.append(state)
        self._hashes[node.pages] = hashes
        self._add(Stored(root, parent, hashes, np.frombuffer(node.key, np.int32)))

    def removed(self, pages: Ints) -> None:
        """The pages of a node were dropped from the tree."""
        hashes = self._hashes[pages]
        if hashes.any():
            self._hashes[pages] = 0
            last = self._pending[-1] if self._pending else None
            if isinstance(last, Removed):
                last.hashes.extend(hashes.tolist())
            else:
                self._add(Removed(hashes.tolist()))

    def cleared(self) -> None:
        """The cache is empty. All removals were published before, for routers that ignore this event."""
        self._add(Cleared())

    def _add(self, event: CacheEvent) -> None:
        self._pending.append(event)
        if len(self._pending) == 1:
            self.on_first()


def _seed(root: RootKey) -> int:
    return _digest(msgspec.msgpack.encode((root.adapter, root.tenant)))


def _digest(data: bytes) -> int:
    """The hash of `data`, never 0."""
    return int.from_bytes(blake2b(data, digest_size=HASH_BYTES).digest(), "big") or 1
