"""The KV pool as the scheduler sees it: reserve, commit, release."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from core.cache.checkpoints import GAIN, INTERVAL, SPARE, TAIL, Checkpoints
from core.cache.events import CacheEvents
from core.cache.evict import EVICTION_KEYS
from core.cache.hold import Hold
from core.cache.integrity import check
from core.cache.key import pack
from core.cache.node import RadixNode
from core.cache.pages import IntegrityError, PageAllocator
from core.cache.pins import Pins
from core.cache.radix import Prefix, RadixTree
from core.config import Eviction
from core.stats import CacheStatistics
from core.types import Ints, RootKey


class Match(NamedTuple):
    """A cached prefix. Nothing is locked: reserve it before anything else touches the cache."""

    node: RadixNode
    pages: Ints
    """int32 [tokens / page_size]."""
    tokens: int
    queried: int = 0
    """Tokens that were looked up, for the hit rate."""
    checkpoint: int = 0
    """The checkpoint with the states of linear attention; 0: those before the first token."""
    known: int = 0
    """Tokens of the same whose pages are cached. They are of use up to a node with a checkpoint."""
    fresh: int = 0
    """Tokens of it that can be used as well from the next step on, 0 for none."""


def worth_waiting(match: Match) -> bool:
    """Whether more of a prefix can be used from the next step on, whose states are saved in this one."""
    return match.fresh - match.tokens >= GAIN


class CacheManager:
    """Pages for requests, with the KV of equal prefixes reused.

    Owner: event loop; the scheduler uses the cache through it alone. `num_pages` includes page 0, the
    dump, which is never handed out. With `radix` off every match is empty and nothing is kept.
    `pin_share` of the pool may be pinned. `events` are told what the tree stores and removes; None costs
    nothing.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        radix: bool = True,
        eviction: Eviction = "lru",
        pin_share: float = 0.5,
        events: CacheEvents | None = None,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {page_size}")
        self.page_size = page_size
        self._radix = radix
        self._pages = PageAllocator(num_pages)
        self._events = events
        self._tree = RadixTree(page_size, EVICTION_KEYS[eviction], events)
        self._checkpoints: Checkpoints | None = None
        self.interval = 0
        """Tokens between the checkpoints of an answer, whole pages; 0: there are none to be made."""
        self._pins = Pins(self._tree, int(self._pages.total * pin_share))
        self._queried_tokens = 0
        self._hit_tokens = 0
        self._evicted_pages = 0

    def with_checkpoints(self, total: int | None) -> CacheManager:
        """This cache, still empty, of a model with linear attention whose states can be saved `total` times;
        None: it has none."""
        if total is not None:
            self._checkpoints = self._tree.checkpoints = Checkpoints(total)
            if self._radix and total:
                self.interval = -(-INTERVAL // self.page_size) * self.page_size
        return self

    # -- the life of a request: match, reserve, commit chunks, release

    def match(self, root: RootKey, tokens: Ints, limit: int) -> Match:
        """Longest cached prefix of `tokens` (int32), whole pages, at most `limit` tokens.

        Takes no lock. Refreshes access times, so that what is about to be admitted is evicted last,
        and may split nodes.
        """
        key = self._key(tokens, limit)
        node = self._tree.match(root, key) if key else self._tree.top
        if (checkpoints := self._checkpoints) is None:
            pages = self._tree.pages(node)
            return Match(node, pages, len(pages) * self.page_size, len(tokens))
        known, fresh, node = node, checkpoints.fresh(node), checkpoints.usable(node)
        pages = self._tree.pages(node)
        return Match(
            node,
            pages,
            len(pages) * self.page_size,
            len(tokens),
            node.checkpoint,
            self._depth(known),
            0 if fresh is None else self._depth(fresh),
        )

    def _depth(self, node: RadixNode) -> int:
        """Tokens from the root down to the node's end."""
        return sum(len(each.pages) for each in node.path()) * self.page_size

    def peek(self, root: RootKey, tokens: Ints, limit: int) -> Prefix:
        """The prefix that `match` would find, with nothing refreshed and no node split: for ranking and
        counting."""
        prefix = self._tree.peek(root, self._key(tokens, limit))
        if self._checkpoints is None:
            return prefix
        node = self._checkpoints.usable(prefix.node)
        return Prefix(node, b"", None, self._depth(node))

    def is_current(self, prefix: Prefix) -> bool:
        """Whether the tree is still as it was where the prefix ends. O(1). With checkpoints, which come and
        go by themselves, it is always looked at again."""
        return self._checkpoints is None and self._tree.is_current(prefix)

    def _key(self, tokens: Ints, limit: int) -> bytes:
        """The key of the whole pages among the first `limit` tokens."""
        pages = max(min(limit, len(tokens)) // self.page_size, 0) if self._radix else 0
        return pack(tokens[: pages * self.page_size])

    def would_fit(self, prefix: Prefix, num_tokens: int, spare: int, gone: Sequence[Hold] = ()) -> bool:
        """Whether `try_reserve` would succeed for the prefix once the holds in `gone` were released."""
        locks = Counter(node for hold in gone for node in hold.node.path())
        given = sum(len(node.pages) for node, count in locks.items() if node.locks == count)
        given += sum(len(hold.pages) - hold.shared + len(hold.duplicates) for hold in gone)
        shared = prefix.tokens // self.page_size
        need = max(-(-num_tokens // self.page_size) - shared, 0)
        # What the prefix stands on is locked then, and nothing of it can be evicted.
        spelled = prefix.node.path()
        need += sum(len(node.pages) for node in spelled if node.locks == locks[node])
        if prefix.below is not None and prefix.below.locks == locks[prefix.below]:
            need += shared - sum(len(node.pages) for node in spelled)
        return need + spare <= self.available() + given

    def try_reserve(self, match: Match, num_tokens: int, spare: int = 0) -> Hold | None:
        """Lock the match and take pages until the hold covers `num_tokens`, evicting if need be.

        None, with nothing changed, when that would leave fewer than `spare` pages available.
        """
        self._tree.lock(match.node)
        # Counted after the lock: the matched pages themselves are no longer evictable.
        need = max(-(-num_tokens // self.page_size) - len(match.pages), 0)
        fresh = self.try_take(need) if need + spare <= self.available() else None
        if fresh is None:
            self._tree.unlock(match.node)
            return None
        # Uses are counted here, not in `match`: a request that waits for room is matched again in
        # every step, which would make its prefix look popular and the hit rate meaningless.
        self._tree.credit(match.node)
        self._hit_tokens += match.tokens
        self._queried_tokens += match.queried
        hold = Hold(match.node, match.pages.tolist() + fresh.tolist(), len(match.pages))
        if self._checkpoints is not None:
            self._checkpoints.touch(match.node)
            hold.marks = self._marks(match, num_tokens)
        return hold

    def _marks(self, match: Match, num_tokens: int) -> dict[int, bool]:
        """Positions at which to save the states of a prompt: behind its last whole page, which is as much of
        it as an equal or a longer prompt can use, and where it diverges from what others have computed: the
        next prompt that diverges there need not begin before. Those to spare: see `SPARE`."""
        if not self.interval:
            return {}
        end = max(num_tokens - 1 - TAIL, 0) // self.page_size * self.page_size
        sizes = itertools.takewhile(end.__ge__, (SPARE << more for more in itertools.count()))
        found = dict.fromkeys((end // size * size for size in sizes), True)
        if match.known < end and match.known - match.tokens >= GAIN:
            found[match.known] = False
        found[end] = False
        return {mark: spare for mark, spare in sorted(found.items()) if mark > match.tokens}

    def try_take(self, n: int) -> Ints | None:
        """`n` fresh pages, int32 [n], evicting if need be; None, with nothing changed, if too few."""
        short = n - self._pages.free
        if short > 0:
            if short > self._tree.evictable:
                return None
            self._evicted_pages += self._evict(short)
        return self._pages.try_take(n)

    def _evict(self, n: int) -> int:
        """Free at least `n` of the evictable pages, pinned ones last; returns how many it freed."""
        freed, unpinned = 0, self._pins.give_way()
        while True:
            dropped = self._tree.evict(n - freed)
            self._pages.release(dropped)
            freed += len(dropped)
            if freed >= n or not next(unpinned, False):
                return freed

    def commit(self, hold: Hold, root: RootKey, tokens: Ints, priority: int = 0) -> None:
        """The KV of the hold's first `len(tokens)` tokens is (in stream order) written: share it.

            hold.pages:  0 ...... shared ........ shared + found ...... end ...... len(pages)
                         | in the tree | tree had equal | new in the tree | private      |

        `shared` advances to `end` and the lock moves down with it. Where the tree had equal pages,
        the request goes on using its own, which become `duplicates`.
        """
        start = _alive(hold).shared
        if len(tokens) > len(hold.pages) * self.page_size:
            raise ValueError(f"{len(tokens)} tokens committed on {len(hold.pages)} pages")
        if not self._radix:
            return
        end = len(tokens) // self.page_size
        if end <= start:
            self._tree.promote(hold.node, priority)
            return
        # From the hold's node, not from the root: splits leave old objects the suffix, so it ends
        # at `start` pages whatever happened above it.
        key = pack(tokens[start * self.page_size : end * self.page_size])
        hold.node, found = self._tree.insert(hold.node, root, key, hold.pages[start:end], priority)
        hold.duplicates += hold.pages[start : start + found]
        hold.shared = end

    # -- states of linear attention

    def next_step(self) -> None:
        """Planning of the next step begins: checkpoints of earlier steps can be read from now on."""
        if self._checkpoints is not None:
            self._checkpoints.next_step()

    def save(self, hold: Hold, num_tokens: int) -> int:
        """The checkpoint that has to take the states behind a hold's first tokens, whole pages that are
        committed; 0: none."""
        pages = num_tokens // self.page_size
        if self._checkpoints is None or pages > hold.shared:
            return 0
        node = self._tree.cut(hold.node, hold.shared, pages)
        return self._checkpoints.add(node, hold.marks[num_tokens])

    def save_ahead(self, hold: Hold, num_tokens: int, new: bool = True) -> int:
        """`save` for tokens that will be committed when the hold is released. The same tokens get the same
        checkpoint again; others get one only if `new`."""
        if self._checkpoints is None:
            return 0
        known = dict(hold.pending).get(num_tokens, 0)
        return known or (self._checkpoints.pend(hold, num_tokens) if new else 0)

    def _settle(self, hold: Hold, keep: bool) -> None:
        """Give the last state that was saved ahead to the node that was committed up to it."""
        if self._checkpoints is None or not hold.pending:
            return
        free = hold.pending
        committed = [each for each in free if keep and each[0] <= hold.shared * self.page_size]
        hold.pending = [each for each in free if each not in committed] + committed
        node = None
        if committed:
            node = self._tree.cut(hold.node, hold.shared, committed[-1][0] // self.page_size)
        self._checkpoints.settle(hold, node)

    def release(self, hold: Hold, root: RootKey, tokens: Ints | None, priority: int = 0) -> None:
        """Commit `tokens` if given, then let go of everything. The hold is dead afterwards; using
        it again raises `IntegrityError`."""
        if tokens is not None:
            self.commit(hold, root, tokens, priority)
        self._let_go(hold, keep=True)

    def discard(self, hold: Hold) -> None:
        """Release everything and keep none of it for others: also pages of the tree that no other hold
        locks. The hold is dead afterwards."""
        self._let_go(hold, keep=False)

    def forget(self, root: RootKey, tokens: Ints) -> None:
        """Drop what is cached of `tokens` and not locked."""
        match = self.match(root, tokens, len(tokens))
        self._tree.lock(match.node)
        self._pages.release(self._tree.unlock(match.node, keep=False))

    def _let_go(self, hold: Hold, keep: bool) -> None:
        self._settle(_alive(hold), keep)
        self._pages.release(self._tree.unlock(_alive(hold).node, keep))
        self._pages.release(hold.pages[hold.shared :] + hold.duplicates)
        hold.node, hold.pages, hold.duplicates, hold.shared = self._tree.top, [], [], -1

    # -- pins

    def pin(self, hold: Hold, owner: str, num_tokens: int, seconds: float, now: float) -> int:
        """Keep the first `num_tokens` tokens of a hold's prompt for `seconds` from `now`, softly: pages
        without a pin are evicted first, and no request waits for a pin.

        Returns the tokens that are pinned: whole pages in the tree, within the share of `owner`.
        """
        shared = _alive(hold).shared
        pages = min(num_tokens // self.page_size, shared, self._pins.owner_limit)
        if pages <= 0:
            return 0
        self._pins.add(owner, self._tree.cut(hold.node, shared, pages), seconds, now)
        return pages * self.page_size

    def expire(self, now: float) -> None:
        """Forget the pins whose time is over. Cheap enough for every step."""
        self._pins.expire(now)

    # -- the pool

    @property
    def total(self) -> int:
        """Pages of the pool, without page 0, which no request gets."""
        return self._pages.total

    def available(self) -> int:
        """Pages that could be taken now: free and evictable, pinned ones among them."""
        return self._pages.free + self._tree.evictable

    def flush(self) -> int:
        """Drop everything that is cached and not locked, pinned or not; returns the pages freed."""
        freed = self._evict(self._tree.evictable)
        if self._events is not None and not self._tree.nodes:
            self._events.cleared()
        return freed

    def statistics(self) -> CacheStatistics:
        """Counters only: nothing is walked."""
        return CacheStatistics(
            page_size=self.page_size,
            total=self._pages.total,
            free=self._pages.free,
            cached=self._tree.evictable,
            protected=self._tree.protected,
            pinned=self._tree.pinned,
            pins=self._pins.count,
            nodes=self._tree.nodes,
            queried_tokens=self._queried_tokens,
            hit_tokens=self._hit_tokens,
            evicted_pages=self._evicted_pages,
        )

    def check_integrity(self, holds: Iterable[Hold]) -> None:
        """Raise `IntegrityError` unless every page, lock and counter is accounted for, given all
        holds that are alive. Walks everything: for tests and idle times."""
        alive = list(holds)
        check(self._tree, self._pages, self._pins, alive, self.page_size)
        if self._checkpoints is not None:
            self._checkpoints.check(self._tree.walk(), alive)


def _alive(hold: Hold) -> Hold:
    if hold.shared < 0:
        raise IntegrityError("this hold was released before")
    return hold
