"""Random workloads against a plain dictionary, with the books checked after every step.

The oracle knows nothing of nodes: it maps (root, tokens up to the end of a page) to the page that
holds them. Insertions it predicts; evictions it reads off the tree after each call, and says which
were allowed. Of pins it keeps a plain list, longest unused first. Beside it stands the device's memory:
what each page was last written with.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import NamedTuple, get_args

import numpy as np
import pytest

from core.cache import CacheManager, Hold
from core.cache.events import CacheEvents, Cleared, Removed, Stored
from core.config import Eviction
from core.stats import CacheStatistics
from core.types import Ints, RootKey
from tests.rigs.follower import Follower

STEPS = 450
PIN_SHARE = 0.7
ROOTS = (RootKey(), RootKey(adapter="a"), RootKey(salt="a"))

Prefix = tuple[RootKey, bytes]
"""A root and the int32 tokens up to the end of a page."""


OWNERS = ("", "a", "b")
SECONDS = (5.0, 60.0)


class Pinned(NamedTuple):
    """One pin as the oracle knows it."""

    owner: str
    prefixes: tuple[Prefix, ...]
    seconds: float
    expires: float


class Running:
    """One request: `tokens` are known, the KV of the first `written` is in the hold's pages."""

    __slots__ = ("hold", "root", "tokens", "written")

    def __init__(self, root: RootKey, tokens: Ints, hold: Hold, written: int) -> None:
        self.root = root
        self.tokens = tokens
        self.hold = hold
        self.written = written


class World:
    """A cache, its oracle, a device memory and the requests that run."""

    def __init__(self, page_size: int, eviction: Eviction, radix: bool, seed: str) -> None:
        self.rng = random.Random(seed)
        self.size = page_size
        self.radix = radix
        self.num_pages = self.rng.choice([12, 30, 48])
        self.events = CacheEvents(self.num_pages)
        self.cache = CacheManager(
            self.num_pages,
            page_size,
            radix=radix,
            eviction=eviction,
            pin_share=PIN_SHARE,
            events=self.events,
        )
        self.follower = Follower()
        self.cached: dict[Prefix, int] = {}
        self.memory: dict[int, Prefix] = {}
        self.running: list[Running] = []
        self.pins: list[Pinned] = []
        """Longest unused first."""
        self.now = 0.0
        self.gave_way = 0
        """Pins that were dropped because pages were needed."""
        # Prompts are drawn from two patterns for a page, so that prefixes collide at any page size.
        self.patterns = [[self.rng.randrange(2) for _ in range(page_size)] for _ in range(2)]

    # -- the oracle

    def prefix(self, root: RootKey, tokens: Ints, page: int) -> Prefix | None:
        """The prefix under which page number `page` of `tokens` is cached; None if that is not known yet."""
        end = (page + 1) * self.size
        return (root, tokens[:end].tobytes()) if end <= len(tokens) else None

    def expected(self, root: RootKey, tokens: Ints, limit: int) -> list[int]:
        pages: list[int] = []
        while len(pages) < limit // self.size:
            prefix = self.prefix(root, tokens, len(pages))
            if prefix is None or prefix not in self.cached:
                break
            pages.append(self.cached[prefix])
        return pages

    def protected(self) -> set[Prefix]:
        held = set()
        for request in self.running:
            for page in range(request.hold.shared):
                prefix = self.prefix(request.root, request.tokens, page)
                assert prefix is not None
                held.add(prefix)
        return held

    def in_tree(self) -> set[int]:
        return {page for node in self.cache._tree.walk() for page in node.pages.tolist()}

    def forget_evicted(self, allowed: bool) -> None:
        """Take from the oracle what the tree has dropped; raise if it must not have."""
        present = self.in_tree()
        gone = {prefix for prefix, page in self.cached.items() if page not in present}
        assert allowed or not gone, "evicted without need"
        self.give_way(gone)
        assert not gone & self.protected(), "evicted under a lock"
        for prefix in gone:
            del self.cached[prefix]
        assert set(self.cached.values()) == present, "the tree holds what nobody inserted"
        for root, tokens in self.cached:
            before = tokens[: -4 * self.size]
            first = len(before) < 4 * self.size
            assert first or (root, before) in self.cached, "a hole in a prefix"

    def pinned(self) -> set[Prefix]:
        return {prefix for pin in self.pins for prefix in pin.prefixes}

    def give_way(self, gone: set[Prefix]) -> None:
        """Drop as many pins as the cache did; raise if they were not the oldest that nobody stands on,
        if anything else was left when the last of them went, or if a page went with its pin in place."""
        held = self.protected()
        for _ in range(len(self.pins) - self.cache.statistics().pins):
            left = set(self.cached) - self.pinned() - held - gone
            assert not left, "a pin gave way while there was something else"
            self.pins.remove(next(pin for pin in self.pins if pin.prefixes[-1] not in held))
            self.gave_way += 1
        assert not gone & self.pinned(), "evicted under a pin"

    def limit(self, owner: str) -> None:
        """Drop pins beyond the limits: the owner's oldest go first, then anybody's."""

        def pages(pins: list[Pinned]) -> int:
            return len({prefix for pin in pins for prefix in pin.prefixes})

        most = int((self.num_pages - 1) * PIN_SHARE)
        while pages(own := [pin for pin in self.pins if pin.owner == owner]) > int(most * 0.5):
            self.pins.remove(own[0])
        while pages(self.pins) > most:
            self.pins.remove(self.pins[0])

    def follow(self) -> None:
        """Check that a router that follows the events knows every page without a salt, with its adapter and
        its tokens."""
        for event in self.events.take():
            if isinstance(event, Stored):
                tokens = event.tokens.tolist()
                self.follower.stored(event.root.adapter, event.parent, event.hashes, tokens)
            elif isinstance(event, Removed):
                self.follower.removed(event.hashes)
            else:
                assert not len(self.follower), "what was flushed is removed before"
        told = [(root, key) for root, key in self.cached if not root.salt]
        seen = [(each.adapter, np.array(each.tokens, np.int32).tobytes()) for each in self.follower]
        assert Counter(seen) == Counter((root.adapter, key) for root, key in told)

    # -- what a scheduler does

    def draw(self) -> Ints:
        rng = self.rng
        if self.running and rng.random() < 0.2:
            base = rng.choice(self.running).tokens.tolist()
            base = base[: rng.randint(0, len(base))]
        else:
            base = []
        for _ in range(rng.randint(0, 5)):
            base += rng.choice(self.patterns)
        base += [rng.randrange(2) for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.2:
            base[rng.randrange(len(base))] ^= 1
        return np.array(base, np.int32)

    def look(self) -> None:
        tokens, root = self.draw(), self.rng.choice(ROOTS)
        limit = self.rng.randint(0, len(tokens))
        prefix = self.cache.peek(root, tokens, limit)
        match = self.cache.match(root, tokens, limit)
        assert match.pages.tolist() == self.expected(root, tokens, limit)
        assert prefix.tokens == match.tokens
        assert match.tokens == len(match.pages) * self.size
        self.forget_evicted(allowed=False)

    def admit(self) -> None:
        tokens, root, spare = self.draw(), self.rng.choice(ROOTS), self.rng.choice([0, 0, 2, 8])
        limit = len(tokens) - 1
        expected = self.expected(root, tokens, limit)
        match = self.cache.match(root, tokens, limit)
        assert match.pages.tolist() == expected
        before = self.cache.statistics()
        would_fit = self.cache.would_fit(self.cache.peek(root, tokens, limit), len(tokens), spare)
        hold = self.cache.try_reserve(match, len(tokens), spare)
        assert would_fit == (hold is not None)
        need = max(-(-len(tokens) // self.size) - len(expected), 0)
        held = self.protected()
        unlocked = sum(self.cached[p] not in expected for p in self.cached if p not in held)
        fits = before.free + unlocked >= need + spare
        assert (hold is not None) == fits
        if hold is None:
            assert self.cache.statistics() == before
            self.forget_evicted(allowed=False)
            return
        for page, at in enumerate(expected):
            assert self.memory[at] == self.prefix(root, tokens, page), "a hit on other content"
        self.running.append(Running(root, tokens, hold, match.tokens))
        self.forget_evicted(allowed=need > before.free)

    def write(self, request: Running, end: int) -> None:
        """The step that computes KV up to `end`: only pages of this request's own."""
        for page in range(request.written // self.size, -(-end // self.size)):
            at = request.hold.pages[page]
            assert at not in self.cached.values(), "a cached page was overwritten"
            prefix = self.prefix(request.root, request.tokens, page)
            if prefix is not None:
                self.memory[at] = prefix
        request.written = end

    def commit(self, request: Running, finish: bool = False) -> None:
        tokens = request.tokens[: request.written]
        hold, start = request.hold, request.hold.shared
        pages = list(hold.pages)
        end = max(len(tokens) // self.size, start) if self.radix else start
        lost = []
        for page in range(start, end):
            prefix = self.prefix(request.root, tokens, page)
            assert prefix is not None
            self.memory[pages[page]] = prefix
            if self.cached.setdefault(prefix, pages[page]) != pages[page]:
                lost.append(pages[page])
        if finish:
            self.running.remove(request)
            self.cache.release(hold, request.root, tokens, self.rng.randint(-2, 2))
            return
        duplicates = hold.duplicates + lost
        self.cache.commit(hold, request.root, tokens, self.rng.randint(-2, 2))
        assert (hold.pages, hold.shared, hold.duplicates) == (pages, end, duplicates)

    def chunk(self) -> None:
        request = self.rng.choice(self.running)
        self.write(request, self.rng.randint(request.written, len(request.tokens)))
        self.commit(request)
        self.forget_evicted(allowed=False)

    def decode(self) -> None:
        request = self.rng.choice(self.running)
        count = self.rng.randint(1, self.size)
        grown = [*request.tokens.tolist(), *(self.rng.randrange(2) for _ in range(count))]
        need = -(-len(grown) // self.size) - len(request.hold.pages)
        before = self.cache.statistics()
        pages = self.cache.try_take(need)
        if pages is None:
            assert need > before.free + before.cached
            assert self.cache.statistics() == before
            self.commit(request, finish=True)  # retracted
            self.forget_evicted(allowed=False)
            return
        request.hold.pages += pages.tolist()
        request.tokens = np.array(grown, np.int32)
        self.forget_evicted(allowed=need > before.free)

    def finish(self) -> None:
        request = self.rng.choice(self.running)
        self.write(request, len(request.tokens))
        self.commit(request, finish=True)
        self.forget_evicted(allowed=False)

    def abort(self) -> None:
        request = self.rng.choice(self.running)
        self.running.remove(request)
        self.cache.release(request.hold, request.root, None)
        self.forget_evicted(allowed=False)

    def pin(self) -> None:
        rng, request = self.rng, self.rng.choice(self.running)
        owner, seconds = rng.choice(OWNERS), rng.choice(SECONDS)
        tokens = rng.randint(0, len(request.tokens))
        most = int(int((self.num_pages - 1) * PIN_SHARE) * 0.5)
        pages = min(tokens // self.size, request.hold.shared, most)
        assert self.cache.pin(request.hold, owner, tokens, seconds, self.now) == pages * self.size
        if pages > 0:
            told = [self.prefix(request.root, request.tokens, page) for page in range(pages)]
            prefixes = tuple(prefix for prefix in told if prefix is not None)
            assert len(prefixes) == pages
            shorter = {prefixes[: n + 1] for n in range(pages)}
            alike = [p for p in self.pins if (p.owner, p.seconds) == (owner, seconds)]
            for pin in alike:
                if pin.prefixes in shorter:
                    self.pins.remove(pin)
            self.pins.append(Pinned(owner, prefixes, seconds, self.now + seconds))
            self.limit(owner)
        self.forget_evicted(allowed=False)

    def wait(self) -> None:
        self.now += self.rng.choice([0.5, 2.0, 20.0])
        self.cache.expire(self.now)
        self.pins = [pin for pin in self.pins if pin.expires > self.now]
        self.forget_evicted(allowed=False)

    def flush(self) -> None:
        before = self.cache.statistics()
        assert self.cache.flush() == before.cached
        self.forget_evicted(allowed=True)
        assert set(self.cached) == self.protected()
        assert any(isinstance(each, Cleared) for each in self.events._pending) == (not self.cached)

    def step(self) -> None:
        if self.running:
            actions = [self.look, self.admit, self.chunk, self.decode, self.finish, self.abort, self.flush]
            actions += [self.pin, self.wait]
            (action,) = self.rng.choices(actions, weights=[10, 30, 30, 25, 15, 4, 1, 15, 8])
        else:
            action = self.admit
        action()
        self.cache.check_integrity([request.hold for request in self.running])
        self.follow()
        statistics = self.cache.statistics()
        assert (statistics.pins, statistics.pinned) == (len(self.pins), len(self.pinned()))
        for request in self.running:
            shared = request.hold.shared
            full = self.expected(request.root, request.tokens, shared * self.size)
            assert len(full) == shared, "a locked prefix must always match"

    def drain(self) -> CacheStatistics:
        while self.running:
            self.finish()
        self.cache.check_integrity([])
        return self.cache.statistics()


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("eviction", get_args(Eviction))
def test_random_workload(eviction: Eviction, page_size: int) -> None:
    """Twelve worlds of 450 steps."""
    world = World(page_size, eviction, True, f"{eviction} {page_size}")
    for _ in range(STEPS):
        world.step()
    done = world.drain()
    assert done.protected == 0
    assert done.free + done.cached == done.total
    assert done.evicted_pages > 0, "the pool was never short: the run has shown too little"
    assert done.hit_tokens > 0
    assert world.gave_way > 0, "no pin ever stood in the way"


@pytest.mark.parametrize("page_size", [1, 16])
def test_random_workload_without_the_tree(page_size: int) -> None:
    world = World(page_size, "lru", False, f"off {page_size}")
    for _ in range(STEPS):
        world.step()
    done = world.drain()
    assert done.free == done.total
    assert (done.hit_tokens, done.nodes) == (0, 0)
