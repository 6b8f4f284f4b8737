"""The cache as the scheduler uses it: match, reserve, take, commit, release."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from core.cache import CacheManager, Hold, IntegrityError
from core.config import Eviction
from core.types import Ints, RootKey
from tests.rigs.arrays import ints
from tests.rigs.cache import A, B, admit, seq


def serve(cache: CacheManager, tokens: Ints, root: RootKey = A) -> None:
    """One request from start to end."""
    cache.release(admit(cache, tokens, root), root, tokens)
    cache.check_integrity([])


class TestMatch:
    def test_whole_pages_up_to_the_limit(self) -> None:
        cache = CacheManager(32, 4)
        serve(cache, seq(14))
        tokens = seq(14)
        assert [cache.match(A, tokens, limit).tokens for limit in (0, 3, 4, 11, 12, 14)] == [
            0,
            0,
            4,
            8,
            12,
            12,
        ]
        assert cache.match(A, tokens[:7], 99).tokens == 4
        assert cache.match(A, tokens, -1).tokens == 0
        assert cache.match(A, tokens[:0], 8).tokens == 0
        cache.check_integrity([])

    def test_pages_are_int32_and_the_callers_own(self) -> None:
        cache = CacheManager(32, 4)
        serve(cache, seq(8))
        pages = cache.match(A, seq(8), 8).pages
        assert pages.dtype == np.int32
        before = pages.tolist()
        pages[:] = 0
        assert cache.match(A, seq(8), 8).pages.tolist() == before

    def test_another_root_sees_nothing(self) -> None:
        cache = CacheManager(32, 4)
        serve(cache, seq(8))
        assert cache.match(B, seq(8), 8).tokens == 0
        assert cache.match(RootKey(salt="x"), seq(8), 8).tokens == 0

    def test_with_the_tree_off_nothing_is_kept(self) -> None:
        cache = CacheManager(32, 4, radix=False)
        hold = admit(cache, seq(9))
        cache.commit(hold, A, seq(9))
        assert hold.shared == 0
        assert cache.match(A, seq(9), 9).tokens == 0
        cache.check_integrity([hold])
        cache.release(hold, A, seq(9))
        assert cache.match(A, seq(9), 9).tokens == 0
        assert cache.statistics().free == 31
        cache.check_integrity([])


class TestReserve:
    def test_covers_the_tokens_and_no_more(self) -> None:
        cache = CacheManager(32, 4)
        for n, pages in [(0, 0), (1, 1), (4, 1), (5, 2)]:
            hold = cache.try_reserve(cache.match(A, seq(n), n), n)
            assert hold is not None
            assert len(hold.pages) == pages
            assert 0 not in hold.pages
            cache.release(hold, A, None)

    def test_starts_with_the_matched_pages(self) -> None:
        cache = CacheManager(32, 4)
        serve(cache, seq(8))
        match = cache.match(A, seq(12), 11)
        hold = cache.try_reserve(match, 12)
        assert hold is not None
        assert hold.pages[:2] == match.pages.tolist()
        assert (len(hold.pages), hold.shared) == (3, 2)
        cache.check_integrity([hold])

    def test_refusal_changes_nothing(self) -> None:
        cache = CacheManager(9, 4)
        serve(cache, seq(16))
        hold = admit(cache, seq(12, 100))
        before = cache.statistics()
        assert cache.try_reserve(cache.match(A, seq(40), 16), 40) is None
        assert cache.statistics() == before
        cache.check_integrity([hold])

    def test_matched_pages_are_not_room_for_themselves(self) -> None:
        """Eight pages, four cached and matched: four more fit, five do not."""
        cache = CacheManager(9, 4)
        serve(cache, seq(16))
        assert cache.available() == 8
        assert cache.try_reserve(cache.match(A, seq(36), 16), 36) is None
        hold = cache.try_reserve(cache.match(A, seq(32), 16), 32)
        assert hold is not None
        assert cache.available() == 0
        cache.check_integrity([hold])

    def test_spare_pages_are_left_over_free_or_evictable(self) -> None:
        cache = CacheManager(9, 4)
        serve(cache, seq(12))
        tokens = seq(16, 100)
        assert cache.try_reserve(cache.match(A, tokens, 15), 16, spare=5) is None
        hold = cache.try_reserve(cache.match(A, tokens, 15), 16, spare=4)
        assert hold is not None
        assert cache.available() == 4
        cache.check_integrity([hold])

    def test_evicts_what_it_needs(self) -> None:
        cache = CacheManager(9, 4)
        serve(cache, seq(16))
        serve(cache, seq(16, 100))
        hold = admit(cache, seq(8, 200))
        assert cache.match(A, seq(16), 16).tokens == 0, "the older went"
        assert cache.match(A, seq(16, 100), 16).tokens == 16
        assert cache.statistics().evicted_pages == 4
        cache.check_integrity([hold])


class TestTake:
    def test_evicts_and_stops(self) -> None:
        cache = CacheManager(9, 4)
        serve(cache, seq(16))
        serve(cache, seq(16, 100))
        hold = cache.try_reserve(cache.match(B, seq(0), 0), 0)
        assert hold is not None
        pages = cache.try_take(3)
        assert pages is not None
        hold.pages += pages.tolist()
        assert (cache.statistics().free, cache.statistics().cached) == (1, 4)
        cache.check_integrity([hold])

    def test_too_many_is_none_and_evicts_nothing(self) -> None:
        cache = CacheManager(9, 4)
        serve(cache, seq(16))
        before = cache.statistics()
        assert cache.try_take(9) is None
        assert cache.statistics() == before


class TestCommit:
    def test_chunks_become_visible_as_they_are_committed(self) -> None:
        cache = CacheManager(32, 4)
        tokens = seq(18)
        hold = admit(cache, tokens)
        for n, shared in [(3, 0), (4, 1), (4, 1), (11, 2), (18, 4)]:
            cache.commit(hold, A, tokens[:n])
            assert hold.shared == shared
            assert cache.match(A, tokens, 18).tokens == 4 * shared
            cache.check_integrity([hold])
        assert hold.duplicates == []

    def test_the_page_after_the_last_full_one_stays_private(self) -> None:
        cache = CacheManager(32, 4)
        hold = admit(cache, seq(6))
        last = hold.pages[-1]
        cache.release(hold, A, seq(6))
        free = cache.try_take(cache.statistics().free)
        assert free is not None
        assert last in free.tolist()

    def test_of_two_equal_prompts_the_first_page_is_canonical(self) -> None:
        cache = CacheManager(32, 4)
        tokens = seq(13)
        first, second = admit(cache, tokens), admit(cache, tokens)
        own = list(second.pages)
        cache.commit(first, A, tokens)
        cache.commit(second, A, tokens)
        assert second.pages == own, "attention goes on reading what this request wrote"
        assert second.duplicates == own[:3]
        assert second.shared == 3
        assert cache.match(A, tokens, 13).pages.tolist() == first.pages[:3]
        cache.check_integrity([first, second])
        cache.release(first, A, None)
        cache.check_integrity([second])
        cache.release(second, A, tokens)
        cache.check_integrity([])
        assert (cache.statistics().cached, cache.statistics().free) == (3, 28)

    def test_half_of_a_commit_can_be_duplicates(self) -> None:
        cache = CacheManager(32, 4)
        long, short = admit(cache, seq(16)), admit(cache, seq(8))
        own = list(long.pages)
        cache.commit(short, A, seq(8))
        cache.commit(long, A, seq(16))
        assert long.duplicates == own[:2]
        assert cache.match(A, seq(16), 16).pages.tolist() == short.pages + own[2:]
        cache.check_integrity([long, short])

    def test_goes_on_below_a_node_that_was_split_meanwhile(self) -> None:
        cache = CacheManager(32, 4)
        tokens = seq(24)
        hold = admit(cache, tokens)
        cache.commit(hold, A, tokens[:16])
        other = ints([*range(8), *range(90, 96)])
        cache.release(admit(cache, other), A, other)
        assert cache.statistics().nodes == 3
        cache.commit(hold, A, tokens)
        assert cache.match(A, tokens, 24).pages.tolist() == hold.pages
        cache.release(hold, A, None)
        assert cache.statistics().protected == 0
        cache.check_integrity([])

    def test_more_tokens_than_the_hold_covers_is_a_bug_and_says_so(self) -> None:
        cache = CacheManager(32, 4)
        hold = admit(cache, seq(8))
        with pytest.raises(ValueError, match="9 tokens committed on 2 pages"):
            cache.commit(hold, A, seq(9))

    def test_priority_rises_even_when_nothing_is_new(self) -> None:
        cache = CacheManager(5, 4, eviction="priority")
        serve(cache, seq(8))
        hold = admit(cache, ints([*range(8), 8]))
        cache.release(hold, A, seq(8), priority=5)
        serve(cache, seq(8, 100))
        admit(cache, seq(8, 200))
        assert cache.match(A, seq(8), 8).tokens == 8
        assert cache.match(A, seq(8, 100), 8).tokens == 0


class TestRelease:
    def test_without_tokens_the_uncommitted_is_freed(self) -> None:
        cache = CacheManager(32, 4)
        hold = admit(cache, seq(16))
        cache.commit(hold, A, seq(8))
        cache.release(hold, A, None)
        assert (cache.statistics().free, cache.statistics().cached) == (29, 2)
        cache.check_integrity([])

    def test_decode_pages_are_committed_with_the_output(self) -> None:
        cache = CacheManager(32, 4)
        hold = admit(cache, seq(4))
        for _ in range(2):
            page = cache.try_take(1)
            assert page is not None
            hold.pages.append(int(page[0]))
        cache.check_integrity([hold])
        cache.release(hold, A, seq(11))
        assert cache.match(A, seq(12), 12).tokens == 8
        cache.check_integrity([])

    @pytest.mark.parametrize("again", ["release", "commit"])
    def test_a_dead_hold_is_refused_and_nothing_changes(self, again: str) -> None:
        cache = CacheManager(32, 4)
        hold = admit(cache, seq(8))
        cache.release(hold, A, seq(8))
        assert (hold.pages, hold.duplicates) == ([], [])
        with pytest.raises(IntegrityError, match="released before"):
            getattr(cache, again)(hold, A, seq(0))
        cache.check_integrity([])

    def test_after_a_split_nothing_stays_protected(self) -> None:
        cache = CacheManager(32, 4)
        hold = admit(cache, seq(16))
        cache.commit(hold, A, seq(16))
        cache.match(A, seq(16), 7)
        other = cache.try_reserve(cache.match(A, seq(16), 8), 8)
        assert other is not None
        cache.release(hold, A, None)
        assert cache.statistics().protected == 2
        cache.release(other, A, None)
        assert cache.statistics().protected == 0
        assert cache.available() == 31
        cache.check_integrity([])


class TestFlush:
    def test_drops_the_unlocked_and_only_those(self) -> None:
        cache = CacheManager(32, 4)
        serve(cache, seq(16))
        serve(cache, seq(8), B)
        hold = admit(cache, seq(9))
        assert cache.flush() == 4
        assert cache.match(A, seq(16), 16).tokens == 8
        assert cache.match(B, seq(8), 8).tokens == 0
        assert cache.statistics().evicted_pages == 0
        cache.check_integrity([hold])
        cache.release(hold, A, None)
        assert cache.flush() == 2
        assert cache.statistics().free == 31
        assert cache.flush() == 0


def test_statistics_count_admissions_not_looks() -> None:
    cache = CacheManager(32, 4)
    serve(cache, seq(9))
    for _ in range(10):
        cache.match(A, seq(11), 10)
    hold = admit(cache, seq(11))
    statistics = cache.statistics()
    assert (statistics.queried_tokens, statistics.hit_tokens) == (9 + 11, 8)
    assert statistics.total - statistics.free - statistics.cached - statistics.protected == 1
    assert (statistics.total, statistics.protected, statistics.nodes) == (31, 2, 1)
    cache.release(hold, A, None)


def _leak(cache: CacheManager, hold: Hold) -> None:
    cache.try_take(1)


def _two_owners(cache: CacheManager, hold: Hold) -> None:
    hold.pages.append(hold.pages[0])


def _lock_without_hold(cache: CacheManager, hold: Hold) -> None:
    cache._tree.lock(hold.node)


def _counter(cache: CacheManager, hold: Hold) -> None:
    cache._tree.evictable += 1


def _misfiled(cache: CacheManager, hold: Hold) -> None:
    hold.node.key = hold.node.key[::-1]


def _unaligned(cache: CacheManager, hold: Hold) -> None:
    hold.node.key = hold.node.key[:-8]


def _other_page(cache: CacheManager, hold: Hold) -> None:
    hold.pages[0], hold.pages[-1] = hold.pages[-1], hold.pages[0]


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (_leak, "are lost"),
        (_two_owners, "two owners"),
        (_lock_without_hold, "2 locks for 1 holds"),
        (_counter, "counted"),
        (_misfiled, "filed under another page"),
        (_unaligned, "not aligned"),
        (_other_page, "duplicates"),
    ],
)
def test_integrity_names_the_damage(damage: Callable[[CacheManager, Hold], None], complaint: str) -> None:
    cache = CacheManager(32, 4)
    hold = admit(cache, seq(10))
    cache.commit(hold, A, seq(10))
    cache.check_integrity([hold])
    damage(cache, hold)
    with pytest.raises(IntegrityError, match=complaint):
        cache.check_integrity([hold])


def test_integrity_misses_a_hold_that_is_not_listed() -> None:
    cache = CacheManager(32, 4)
    admit(cache, seq(10))
    with pytest.raises(IntegrityError, match="1 locks for 0 holds"):
        cache.check_integrity([])


def test_a_peek_changes_nothing_and_knows_when_it_is_outdated() -> None:
    cache = CacheManager(64, 4)
    serve(cache, seq(16))
    tokens = np.concatenate([seq(8), seq(8, 100)])
    before = cache.statistics()
    inside = cache.peek(A, tokens, 16)
    nowhere = cache.peek(B, tokens, 16)
    assert (inside.tokens, nowhere.tokens) == (8, 0)
    assert cache.statistics() == before
    assert cache.is_current(inside) and cache.is_current(nowhere)
    serve(cache, seq(20))  # grows elsewhere
    assert cache.is_current(inside)
    serve(cache, tokens)  # splits the node that the peek ended in
    assert not cache.is_current(inside)
    longer = cache.peek(A, tokens, 16)
    assert longer.tokens == 16
    serve(cache, seq(4, 50), B)
    assert not cache.is_current(nowhere)
    cache.flush()
    assert not cache.is_current(longer)


def test_the_collector_walks_no_node_and_a_dropped_one_is_gone_at_once() -> None:
    cache = CacheManager(65, 4)
    for tokens in (seq(8), seq(8, 100), ints([0, 1, 2, 3, 7, 7, 7, 7])):
        serve(cache, tokens)
    nodes = list(cache._tree.walk())
    assert len(nodes) == 5  # the root, one alone, and two behind their common page
    assert not any(gc.is_tracked(node) or gc.is_tracked(node.children) for node in nodes)
    pages = [weakref.ref(node.pages) for node in nodes if len(node.pages)]
    del nodes
    enabled = gc.isenabled()
    gc.disable()
    try:
        cache.flush()
        assert [ref() for ref in pages] == [None] * 4
    finally:
        if enabled:
            gc.enable()


@pytest.mark.parametrize("eviction", ["lru", "lfu", "fifo", "priority"])
def test_the_garbage_collector_has_nothing_to_look_at_in_a_tree(eviction: Eviction) -> None:
    """A full collection walks all that it tracks: of a large cache that would be a pause."""
    cache = CacheManager(4096, 4, eviction=eviction)
    serve(cache, seq(9))
    gc.collect()
    before = len(gc.get_objects())
    for i in range(500):
        cache.release(admit(cache, tokens := seq(9, 1000 + 20 * i)), A, tokens)
    assert cache.statistics().nodes > 500
    assert len(gc.get_objects()) - before < 50
