"""Soft pins: what stays longer, for how long, for whom, and that nobody ever waits for one."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

import pytest

from core.cache import CacheManager, Hold, IntegrityError, pins
from core.cache.pins import MAX_PINS
from core.request import Pinning, Request
from tests.rigs.arrays import ints
from tests.rigs.cache import A, B, admit, seq
from tests.rigs.scheduler import Harness


def keep(
    cache: CacheManager,
    start: int,
    n: int = 8,
    *,
    owner: str = "",
    tokens: int | None = None,
    seconds: float = 300.0,
    now: float = 0.0,
) -> int:
    """Serve `n` tokens from `start` on and pin them; returns the tokens that are pinned."""
    hold = admit(cache, seq(n, start))
    cache.commit(hold, A, seq(n, start))
    kept = cache.pin(hold, owner, n if tokens is None else tokens, seconds, now)
    cache.release(hold, A, seq(n, start))
    cache.check_integrity([])
    return kept


def cached(cache: CacheManager, start: int, n: int = 8) -> int:
    return cache.match(A, seq(n, start), n).tokens


def fill(cache: CacheManager) -> None:
    """Take every page there is, and give it back."""
    n = cache.available()
    hold = cache.try_reserve(cache.match(B, seq(0), 0), n * cache.page_size)
    assert hold is not None
    cache.release(hold, B, None)
    cache.check_integrity([])


def press(cache: CacheManager, pages: int) -> None:
    """Evict as if a request needed all that is free and `pages` more."""
    n = cache.statistics().free + pages
    hold = cache.try_reserve(cache.match(B, seq(0), 0), n * cache.page_size)
    assert hold is not None
    cache.release(hold, B, None)


def test_the_unpinned_goes_first_however_recent() -> None:
    cache = CacheManager(17, 4, pin_share=1.0)
    keep(cache, 0)
    cache.release(admit(cache, seq(8, 100)), A, seq(8, 100))
    press(cache, 2)
    assert (cached(cache, 0), cached(cache, 100)) == (8, 0)


def test_pins_give_way_the_least_recently_used_first() -> None:
    cache = CacheManager(17, 4, pin_share=1.0)
    for start in (0, 100, 200):
        keep(cache, start, seconds=60.0 if start == 100 else 300.0)
    keep(cache, 0)
    press(cache, 2)
    assert [cached(cache, start) for start in (0, 100, 200)] == [8, 0, 8]
    press(cache, 2)
    assert [cached(cache, start) for start in (0, 100, 200)] == [8, 0, 0]
    fill(cache)
    assert (cached(cache, 0), cache.statistics().pins) == (0, 0)


def test_making_room_looks_at_all_pins_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CacheManager(101, 4, pin_share=1.0)
    for i in range(20):
        keep(cache, 1000, owner=f"running {i}")
    for i in range(20):
        keep(cache, 0, owner=f"same {i}")
        keep(cache, 10 * i + 100, owner=f"own {i}")
    hold = admit(cache, seq(9, 1000))  # its pins are skipped, and not over and over
    looks = 0

    def looked(*lines: list[pins.Pin], key: Callable[[pins.Pin], int]) -> Iterator[pins.Pin]:
        nonlocal looks
        looks += 1
        return heapq.merge(*lines, key=key)

    monkeypatch.setattr(pins, "merge", looked)
    press(cache, cache.available() - cache.statistics().free)
    assert (looks, cache.statistics().pins) == (1, 20)
    cache.release(hold, A, None)


def test_all_pages_can_be_had_whatever_is_pinned() -> None:
    cache = CacheManager(9, 4, pin_share=1.0)
    keep(cache, 0, 16)
    assert cache.available() == 8
    fill(cache)
    assert cache.statistics().pinned == 0


def test_a_pin_under_a_running_request_is_not_dropped_for_nothing() -> None:
    cache = CacheManager(9, 4, pin_share=1.0)
    keep(cache, 0)
    keep(cache, 100)
    hold = admit(cache, seq(9))
    press(cache, 2)
    assert (cached(cache, 0), cached(cache, 100), cache.statistics().pins) == (8, 0, 1)
    cache.release(hold, A, None)


def test_only_the_marked_prefix_is_pinned() -> None:
    cache = CacheManager(9, 4, pin_share=1.0)
    assert keep(cache, 0, 16, tokens=7) == 4
    assert cache.statistics().pinned == 1
    press(cache, cache.statistics().cached - 1)
    assert cached(cache, 0, 16) == 4


def test_time_ends_a_pin_and_use_gives_it_more() -> None:
    cache = CacheManager(17, 4)
    keep(cache, 0, now=0.0)
    keep(cache, 100, now=0.0, seconds=3600.0)
    cache.expire(299.0)
    assert cache.statistics().pins == 2
    keep(cache, 0, now=299.0)
    cache.expire(301.0)
    assert cache.statistics().pins == 2
    cache.expire(599.0)
    assert cache.statistics().pins == 1
    cache.expire(3600.0)
    assert (cache.statistics().pins, cache.statistics().pinned) == (0, 0)
    assert cached(cache, 0) == 8, "it is as evictable as anything else, no more"
    cache.check_integrity([])


def test_a_conversation_leaves_one_pin() -> None:
    cache = CacheManager(33, 4)
    for n in (8, 12, 16):
        keep(cache, 0, n)
    assert (cache.statistics().pins, cache.statistics().pinned) == (1, 4)


def test_different_times_of_one_prefix_are_different_pins() -> None:
    cache = CacheManager(33, 4)
    keep(cache, 0, 8, seconds=3600.0)
    keep(cache, 0, 16, seconds=300.0)
    assert (cache.statistics().pins, cache.statistics().pinned) == (2, 4)
    cache.expire(300.0)
    assert (cache.statistics().pins, cache.statistics().pinned) == (1, 2)


def test_an_owner_has_its_share_and_loses_its_own_oldest() -> None:
    cache = CacheManager(17, 4, pin_share=0.5)  # 8 of 16 pages, 4 for each owner
    for start in (0, 100, 200):
        keep(cache, start, owner="a")
    keep(cache, 300, owner="b")
    assert (cache.statistics().pins, cache.statistics().pinned) == (3, 6)
    press(cache, 2)
    assert [cached(cache, start) for start in (0, 100, 200, 300)] == [0, 8, 8, 8]


def test_a_prompt_longer_than_the_share_is_pinned_as_far_as_it_goes() -> None:
    cache = CacheManager(17, 4, pin_share=0.5)
    assert keep(cache, 0, 40) == 16
    assert cache.statistics().pinned == 4


def test_what_conversations_share_counts_once() -> None:
    cache = CacheManager(33, 4, pin_share=0.5)  # 8 pages for an owner
    for last in (90, 91, 92):
        tokens = ints([*range(20), *[last] * 4])
        hold = admit(cache, tokens)
        cache.commit(hold, A, tokens)
        assert cache.pin(hold, "a", 24, 300.0, 0.0) == 24
        cache.release(hold, A, tokens)
    cache.check_integrity([])
    assert (cache.statistics().pins, cache.statistics().pinned) == (3, 8)


def test_all_owners_together_have_theirs() -> None:
    cache = CacheManager(17, 4, pin_share=0.5)
    for i, owner in enumerate("abcde"):
        keep(cache, 100 * i, owner=owner)
    assert (cache.statistics().pins, cache.statistics().pinned) == (4, 8)


def test_the_number_of_pins_is_bounded() -> None:
    cache = CacheManager(17, 4)
    hold = admit(cache, seq(8))
    cache.commit(hold, A, seq(8))
    for i in range(MAX_PINS + 3):
        cache.pin(hold, f"key-{i}", 8, 300.0, 0.0)
    assert (cache.statistics().pins, cache.statistics().pinned) == (MAX_PINS, 2)
    cache.release(hold, A, None)
    cache.check_integrity([])


@pytest.mark.parametrize("fields", [{"pin_share": 0.0}, {"radix": False}])
def test_pins_can_be_off(fields: dict[str, float]) -> None:
    cache = CacheManager(17, 4, **fields)  # type: ignore[arg-type]
    assert keep(cache, 0) == 0
    assert (cache.statistics().pins, cache.statistics().pinned) == (0, 0)


def test_flush_takes_pinned_pages_too() -> None:
    cache = CacheManager(17, 4)
    keep(cache, 0)
    assert cache.flush() == 2
    assert cache.statistics().pins == 0
    cache.check_integrity([])


def _count(cache: CacheManager, hold: Hold) -> None:
    cache._tree.pinned += 1


def _node(cache: CacheManager, hold: Hold) -> None:
    hold.node.pins = {"b": 1}


def _owner(cache: CacheManager, hold: Hold) -> None:
    cache._pins._usage["a"] += 1


def _lost(cache: CacheManager, hold: Hold) -> None:
    cache._pins.count -= 1


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [(_count, "counted"), (_node, "miscounted"), (_owner, "counted"), (_lost, "0 pins, 1 in line")],
)
def test_integrity_names_the_damage(damage: object, complaint: str) -> None:
    cache = CacheManager(17, 4)
    hold = admit(cache, seq(8))
    cache.commit(hold, A, seq(8))
    cache.pin(hold, "a", 8, 300.0, 0.0)
    cache.check_integrity([hold])
    assert callable(damage)
    damage(cache, hold)
    with pytest.raises(IntegrityError, match=complaint):
        cache.check_integrity([hold])


# -- through the scheduler -------------------------------------------------------------------------


def pinned(harness: Harness, prompt: list[int], *marks: tuple[int, float], max_tokens: int = 4) -> Request:
    request = harness.request(prompt, max_tokens)
    request.pinning = Pinning("", marks)
    return request


def test_a_prompt_is_pinned_once_all_of_it_is_planned() -> None:
    harness = Harness(pages=64, page_size=4, step_tokens=16)
    request = pinned(harness, list(range(40)), (40, 300.0), (9, 3600.0))
    harness.submit()
    assert request.pinning is not None
    assert request.pinning.kept == ()
    harness.run()
    harness.check(request)
    assert request.pinning.kept == (40, 8)
    assert harness.scheduler.statistics().cache.pinned == 10
    harness.clock.now = 300.0
    assert harness.scheduler.statistics().cache.pinned == 2


def test_pins_never_keep_requests_waiting() -> None:
    """A pool full of pins serves what needs all of it."""
    harness = Harness(pages=32, page_size=4)
    for i in range(8):
        pinned(harness, [i] * 16, (16, 300.0))
    harness.run()
    assert harness.scheduler.statistics().cache.pinned > 0
    large = [harness.request([50 + i] * 40, 20) for i in range(4)]
    harness.run()
    for request in large:
        harness.check(request)


def test_a_retracted_request_is_pinned_again() -> None:
    harness = Harness(pages=10, page_size=4, rows=4)
    requests = [pinned(harness, [i] * 8, (8, 300.0), max_tokens=14) for i in range(3)]
    harness.run()
    assert harness.scheduler.statistics().retractions > 0
    for request in requests:
        harness.check(request)
