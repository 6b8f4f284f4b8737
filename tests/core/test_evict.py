"""Eviction order: each policy by name, and all of them against a search of the whole tree."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from core.cache.evict import EVICTION_KEYS, EvictionKey, fifo, lfu, lru, priority
from core.cache.key import pack
from core.cache.node import RadixNode
from core.cache.radix import RadixTree
from core.config import Eviction
from core.types import RootKey

A = RootKey()


def key(tokens: Sequence[int]) -> bytes:
    return pack(np.array(tokens, np.int32))


def put(tree: RadixTree, tokens: Sequence[int], pages: list[int], importance: int = 0) -> None:
    tree.lock(tree.top)
    tree.unlock(tree.insert(tree.top, A, key(tokens), pages, importance)[0])


def use(tree: RadixTree, tokens: Sequence[int]) -> None:
    """Use nodes as an admission that stands on them does."""
    tree.credit(tree.match(A, key(tokens)))


def three(rank: EvictionKey) -> RadixTree:
    """Pages 1, 2, 3 under tokens 10, 20, 30, in that order of arrival."""
    tree = RadixTree(1, rank)
    for page in (1, 2, 3):
        put(tree, [10 * page], [page])
    return tree


def victims(tree: RadixTree) -> list[int]:
    """Pages in the order in which they go, one call each."""
    pages = []
    while tree.evictable:
        pages += tree.evict(1).tolist()
    return pages


class TestOrders:
    def test_lru_takes_the_longest_unused(self) -> None:
        tree = three(lru)
        tree.match(A, key([10]))
        assert victims(tree) == [2, 3, 1]

    def test_lfu_forgets_what_was_popular_once(self) -> None:
        tree = three(lfu)
        for _ in range(3):
            use(tree, [10])
        for tokens in ([30], [20]):
            for _ in range(40):
                tree.match(A, key(tokens))
        assert victims(tree) == [1, 3, 2]

    def test_lfu_takes_the_least_admitted_then_the_longest_unused(self) -> None:
        tree = three(lfu)
        use(tree, [10])
        use(tree, [10])
        use(tree, [20])
        put(tree, [40], [4])
        assert victims(tree) == [3, 4, 2, 1]

    def test_lfu_looking_is_not_using(self) -> None:
        tree = three(lfu)
        use(tree, [20])
        for _ in range(5):
            tree.match(A, key([30]))
        assert victims(tree) == [1, 3, 2]

    def test_fifo_takes_the_oldest_however_used(self) -> None:
        tree = three(fifo)
        use(tree, [10])
        use(tree, [10])
        assert victims(tree) == [1, 2, 3]

    def test_priority_takes_the_least_important_then_the_longest_unused(self) -> None:
        tree = RadixTree(1, priority)
        for page, importance in enumerate([5, -1, 0, -1], start=1):
            put(tree, [10 * page], [page], importance)
        tree.match(A, key([20]))
        assert victims(tree) == [4, 2, 3, 1]

    def test_priority_is_raised_along_the_path_and_never_lowered(self) -> None:
        tree = RadixTree(1, priority)
        put(tree, [1, 2], [1, 2], 0)
        put(tree, [9], [9], 3)
        put(tree, [1, 5], [7, 5], 8)
        put(tree, [1], [8], 0)
        # Page 1 became important with 5; page 2 beside it did not.
        assert victims(tree) == [2, 9, 5, 1]


class TestQueue:
    def test_stops_once_enough_is_free(self) -> None:
        tree = three(lru)
        assert tree.evict(2).tolist() == [1, 2]
        assert tree.evictable == 1

    def test_a_leaf_goes_whole(self) -> None:
        tree = RadixTree(1, lru)
        put(tree, [1, 2, 3], [1, 2, 3])
        put(tree, [9], [9])
        assert tree.evict(1).tolist() == [1, 2, 3]

    def test_nothing_asked_nothing_gone(self) -> None:
        tree = three(lru)
        assert tree.evict(0).tolist() == []
        assert tree.evictable == 3

    def test_a_parent_that_became_a_leaf_is_next_by_its_rank(self) -> None:
        tree = RadixTree(1, lru)
        put(tree, [1, 2], [1, 2])
        tree.match(A, key([1]))
        put(tree, [7], [7])
        assert victims(tree) == [2, 1, 7]

    def test_one_call_goes_up_a_chain(self) -> None:
        tree = RadixTree(1, lru)
        for n in range(1, 6):
            put(tree, list(range(n)), list(range(1, n + 1)))
        assert tree.evict(4).tolist() == [5, 4, 3, 2]

    def test_the_locked_and_what_is_above_them_stay(self) -> None:
        tree = RadixTree(1, lru)
        put(tree, [1, 2, 3], [1, 2, 3])
        held = tree.match(A, key([1, 2]))
        tree.lock(held)
        put(tree, [7], [7])
        assert sorted(tree.evict(99).tolist()) == [3, 7]
        assert tree.pages(held).tolist() == [1, 2]
        tree.unlock(held)
        assert sorted(tree.evict(99).tolist()) == [1, 2]

    def test_equal_ranks_do_not_compare_nodes(self) -> None:
        tree = RadixTree(1, lambda node: (0,))
        for page in range(1, 20):
            put(tree, [page], [page])
        assert sorted(tree.evict(99).tolist()) == list(range(1, 20))

    def test_the_queue_does_not_grow_with_use(self) -> None:
        tree = three(lru)
        for _ in range(100):
            node = tree.match(A, key([10]))
            tree.lock(node)
            tree.unlock(node)
        tree.check_queue()
        assert len(tree._queue) == 3


def next_victim(tree: RadixTree, rank: EvictionKey) -> RadixNode:
    """The slow truth: look at every node."""
    leaves = [n for n in tree.walk() if not n.children and not n.locks and n.parent is not tree.top]
    return min(leaves, key=rank)


@pytest.mark.parametrize("name", list(EVICTION_KEYS))
def test_every_victim_is_the_one_a_full_search_finds(name: Eviction) -> None:
    rank = EVICTION_KEYS[name]
    tree = RadixTree(2, rank)
    rng = random.Random(name)
    fresh = iter(range(1, 10**6))
    held: list[RadixNode] = []
    evicted = 0
    for _ in range(1500):
        tokens = [rng.randrange(2) for _ in range(2 * rng.randint(1, 6))]
        match rng.randrange(6):
            case 0 | 1:
                put(tree, tokens, [next(fresh) for _ in range(len(tokens) // 2)], rng.randint(-3, 3))
            case 2:
                use(tree, tokens)
            case 3:
                node = tree.match(A, key(tokens))
                tree.lock(node)
                held.append(node)
            case 4 if held:
                tree.unlock(held.pop(rng.randrange(len(held))))
            case 5 if tree.evictable:
                expected = next_victim(tree, rank)
                assert tree.evict(1).tolist() == expected.pages.tolist()
                evicted += 1
        tree.check_queue()
    assert evicted > 100
