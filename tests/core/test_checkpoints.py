"""Checkpoints: which prefixes of the tree have the states of linear attention, and how the scheduler uses
them."""

from __future__ import annotations

import random

import pytest

from core.cache import CacheManager, manager
from core.types import Ints
from tests.rigs.cache import A, admit, seq
from tests.rigs.scheduler import Harness

PAGE = 4


def cache(checkpoints: int, pages: int = 4000) -> CacheManager:
    return CacheManager(pages, PAGE).with_checkpoints(checkpoints)


def play(cache: CacheManager, prompt: Ints, answer: int = 0) -> int:
    """A request from its first step to its end; returns the tokens found."""
    cache.next_step()
    match = cache.match(A, prompt, len(prompt) - 1)
    hold = cache.try_reserve(match, len(prompt) + answer)
    assert hold is not None
    cache.commit(hold, A, prompt)
    for mark in hold.marks:
        cache.save(hold, mark)
    whole = seq(len(prompt) + answer)
    whole[: len(prompt)] = prompt
    for tokens in range(len(prompt) + 1, len(whole) + 1):
        if tokens % cache.interval == 0:
            cache.save_ahead(hold, tokens)
            cache.check_integrity([hold])
    cache.release(hold, A, whole)
    cache.check_integrity([])
    return match.tokens


def branch(at: int, length: int, of: int) -> Ints:
    """The first `at` tokens of `seq`, then others."""
    found = seq(length)
    found[at:] += 100_000 * of
    return found


def test_an_equal_prompt_and_a_longer_one_start_from_its_last_page() -> None:
    own = cache(8)
    assert play(own, seq(203)) == 0
    assert play(own, seq(203)) == 192
    assert play(own, seq(400)) == 192


def test_the_second_that_leaves_a_prompt_saves_where_for_the_third() -> None:
    own = cache(8)
    play(own, seq(1001))
    assert play(own, branch(402, 900, 1)) == 0
    assert play(own, branch(402, 900, 2)) == 400
    assert play(own, branch(500, 900, 3)) == 400, "less than is worth one behind 400"


def test_a_turn_starts_from_the_answer_before() -> None:
    own = cache(8)
    play(own, seq(203), answer=150)
    # Behind 320 of 353 tokens, the last multiple of 64.
    assert play(own, seq(500), answer=70) == 320
    assert play(own, seq(700)) == 512


def test_long_prompts_have_spare_ones() -> None:
    """Spare checkpoints serve who leaves the prompt first, and give way before any other."""
    own = cache(8)
    play(own, seq(5000))
    assert play(own, branch(4700, 4800, 1)) == 4608
    assert play(own, branch(4500, 4800, 2)) == 4096
    few = cache(3)
    play(few, seq(203))
    play(few, branch(0, 5000, 1))
    assert play(few, seq(203)) == 192
    assert play(few, branch(0, 5000, 1)) == 4988


def test_the_least_recently_used_gives_way_and_evicted_pages_take_theirs_along() -> None:
    own = cache(2)
    for text in (1, 2):
        play(own, branch(0, 101, text))
    assert play(own, branch(0, 101, 1)) == 92
    play(own, branch(0, 101, 3))
    assert play(own, branch(0, 101, 1)) == 92
    assert play(own, branch(0, 101, 2)) == 0
    small = cache(8, pages=1 + 52)
    for text in (1, 2, 3):
        play(small, branch(0, 101, text))
    assert play(small, branch(0, 101, 1)) == 0
    small.flush()
    small.check_integrity([])


def test_what_a_step_saves_is_of_use_from_the_next_on() -> None:
    own = cache(8)
    own.next_step()
    hold = admit(own, seq(203))
    own.commit(hold, A, seq(203))
    for mark in hold.marks:
        own.save(hold, mark)
    match = own.match(A, seq(300), 299)
    assert (match.tokens, match.known, match.fresh) == (0, 200, 192)
    assert manager.worth_waiting(match)
    own.next_step()
    match = own.match(A, seq(300), 299)
    assert (match.tokens, match.fresh) == (192, 0) and not manager.worth_waiting(match)
    own.discard(hold)
    own.check_integrity([])


def test_without_one_to_give_nothing_is_saved() -> None:
    own = cache(1)
    own.next_step()
    first, second = (admit(own, branch(0, 101, text), room=99) for text in (1, 2))
    assert own.save_ahead(first, 128) == 1
    assert own.save_ahead(second, 128) == 0
    assert own.save_ahead(first, 192) == 1, "its own"
    own.discard(first)
    assert own.save_ahead(second, 192) == 1
    own.discard(second)
    own.check_integrity([])


def test_equal_prompts_of_one_step_are_computed_once() -> None:
    h = Harness(pages=300, rows=6, checkpoints=10, step_tokens=2000)
    same = [h.request(range(90), max_tokens=8) for _ in range(2)]
    long = [h.request([*range(1, 97), *range(96), *range(i, i + 40)], max_tokens=3) for i in range(4)]
    h.run()
    for request in same + long:
        h.check(request)
    # Too short to wait for; of the others the second saves what the rest start from.
    assert [request.cached for request in same] == [0, 0]
    assert [request.cached for request in long] == [0, 0, 192, 192]


@pytest.mark.parametrize(("checkpoints", "drafts"), [(0, 0), (2, 0), (30, 0), (2, 3), (30, 3), (30, 9)])
def test_conversations_with_preemption(
    checkpoints: int, drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts equal the oracle's, and the fake device compares each state with the tokens. Accepted drafts may
    pass several multiples of the interval."""
    monkeypatch.setattr(manager, "GAIN", 8)
    monkeypatch.setattr(manager, "INTERVAL", 8)
    rng = random.Random(checkpoints)
    h = Harness(
        pages=48, rows=4, depth=2, drafts=drafts, checkpoints=checkpoints, seed=5, conservativeness=0.01
    )
    system = [rng.randrange(97) for _ in range(30)]
    texts = [list(system) for _ in range(4)]
    for _ in range(4):
        requests = [h.request(text, max_tokens=rng.randrange(5, 30)) for text in texts]
        h.run()
        own = h.scheduler.cache
        for node in own._tree.walk():
            assert not node.checkpoint or h.executor.checkpoints[node.checkpoint][0] == own._depth(node)
        for text, request in zip(texts, requests, strict=True):
            h.check(request)
            text += [*h.delivered[request.id], rng.randrange(97)]
    assert h.scheduler.counters.retractions > 0
    cached = h.scheduler.counters.cached_tokens
    assert cached == 0 if not checkpoints else cached > 20 * checkpoints
