"""The tree alone: keys, matching, splitting, locking. Page size 2 unless said."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from core.cache.evict import lru
from core.cache.key import WIDTH, common_tokens, pack
from core.cache.node import RadixNode
from core.cache.pages import IntegrityError
from core.cache.radix import RadixTree
from core.types import Ints, RootKey

A = RootKey()
B = RootKey(adapter="b")
C = RootKey(salt="b")


def ints(values: Sequence[int]) -> Ints:
    return np.array(values, np.int32)


def key(*tokens: int) -> bytes:
    return pack(ints(tokens))


def add(tree: RadixTree, tokens: Sequence[int], pages: list[int], root: RootKey = A) -> RadixNode:
    """Insert and leave the end locked, as a request does."""
    tree.lock(tree.top)
    return tree.insert(tree.top, root, key(*tokens), pages, 0)[0]


def put(tree: RadixTree, tokens: Sequence[int], pages: list[int], root: RootKey = A) -> None:
    """Insert and let go."""
    tree.unlock(add(tree, tokens, pages, root))


def found(tree: RadixTree, tokens: Sequence[int], root: RootKey = A) -> list[int]:
    pages: list[int] = tree.pages(tree.match(root, key(*tokens))).tolist()
    return pages


class TestKey:
    def test_it_is_the_tokens(self) -> None:
        assert np.frombuffer(key(5, 0, 7), np.int32).tolist() == [5, 0, 7]

    def test_common_tokens_stop_at_the_first_difference(self) -> None:
        assert common_tokens(key(1, 2, 3, 4), 0, key(1, 2, 9, 4)) == 2
        assert common_tokens(key(0, 1, 2, 3), WIDTH, key(1, 2, 3, 4)) == 3
        assert common_tokens(key(1, 2), 0, key(9)) == 0
        assert common_tokens(key(1), WIDTH, key(9)) == 0


class TestMatch:
    def test_an_empty_tree_matches_nothing(self) -> None:
        tree = RadixTree(2, lru)
        assert tree.match(A, key(1, 2)) is tree.top
        assert found(tree, [1, 2]) == []

    def test_the_longest_prefix_in_whole_pages(self) -> None:
        tree = RadixTree(2, lru)
        put(tree, [1, 2, 3, 4, 5, 6], [11, 12, 13])
        assert found(tree, [1, 2, 3, 4, 5, 6, 7, 8]) == [11, 12, 13]
        assert found(tree, [1, 2, 3, 4]) == [11, 12]
        assert found(tree, [1, 2, 3, 9]) == [11]
        assert found(tree, [9, 2, 3, 4]) == []

    def test_a_match_inside_an_edge_splits_it_once(self) -> None:
        tree = RadixTree(2, lru)
        put(tree, [1, 2, 3, 4, 5, 6], [11, 12, 13])
        first = tree.match(A, key(1, 2, 3, 4))
        assert tree.nodes == 2
        assert tree.match(A, key(1, 2, 3, 4)) is first
        assert tree.nodes == 2
        assert tree.evictable == 3

    def test_branches_share_what_is_common(self) -> None:
        tree = RadixTree(2, lru)
        put(tree, [1, 2, 3, 4], [11, 12])
        put(tree, [1, 2, 5, 6], [21, 22])
        assert found(tree, [1, 2, 3, 4]) == [11, 12]
        assert found(tree, [1, 2, 5, 6]) == [11, 22]
        assert (tree.nodes, tree.evictable) == (3, 3)

    def test_a_shared_first_token_is_not_a_shared_page(self) -> None:
        tree = RadixTree(2, lru)
        put(tree, [1, 2], [11])
        put(tree, [1, 3], [12])
        assert found(tree, [1, 2]) == [11]
        assert found(tree, [1, 3]) == [12]

    def test_roots_never_share(self) -> None:
        tree = RadixTree(2, lru)
        put(tree, [1, 2], [11], A)
        put(tree, [1, 2], [12], B)
        put(tree, [1, 2], [13], C)
        assert [found(tree, [1, 2], root) for root in (A, B, C)] == [[11], [12], [13]]
        assert found(tree, [1, 2], RootKey(adapter="b", salt="b")) == []

    def test_insert_reports_what_was_there(self) -> None:
        tree = RadixTree(2, lru)
        put(tree, [1, 2, 3, 4], [11, 12])
        tree.lock(tree.top)
        node, there = tree.insert(tree.top, A, key(1, 2, 3, 4, 5, 6), [21, 22, 23], 0)
        assert there == 2
        assert tree.pages(node).tolist() == [11, 12, 23]

    def test_insert_goes_on_from_a_node(self) -> None:
        tree = RadixTree(2, lru)
        node = add(tree, [1, 2], [11])
        below = tree.insert(node, A, key(3, 4), [12], 0)[0]
        assert found(tree, [1, 2, 3, 4]) == [11, 12]
        tree.unlock(below)
        assert (tree.protected, tree.evictable, tree.top.locks) == (0, 2, 0)


class TestSplit:
    def test_the_old_object_keeps_the_suffix_and_its_lock_is_let_go(self) -> None:
        """The other way round the suffix stays locked for ever after its holder has left."""
        tree = RadixTree(2, lru)
        held = add(tree, [1, 2, 3, 4, 5, 6], [11, 12, 13])
        prefix = tree.match(A, key(1, 2))
        assert held.pages.tolist() == [12, 13]
        assert held.parent is prefix
        assert (prefix.locks, held.locks) == (1, 1)
        assert tree.pages(held).tolist() == [11, 12, 13]
        tree.unlock(held)
        assert (prefix.locks, held.locks) == (0, 0)
        assert (tree.protected, tree.evictable) == (0, 3)

    def test_a_lock_on_the_prefix_does_not_protect_the_suffix(self) -> None:
        tree = RadixTree(2, lru)
        put(tree, [1, 2, 3, 4], [11, 12])
        prefix = tree.match(A, key(1, 2))
        tree.lock(prefix)
        assert (tree.protected, tree.evictable) == (1, 1)
        assert tree.evict(9).tolist() == [12]
        assert found(tree, [1, 2, 3, 4]) == [11]

    def test_several_splits_of_a_locked_node(self) -> None:
        tree = RadixTree(2, lru)
        held = add(tree, list(range(16)), list(range(1, 9)))
        for n in (12, 4, 8, 2, 14):
            tree.match(A, key(*range(n)))
        assert tree.nodes == 6
        assert tree.protected == 8
        assert tree.pages(held).tolist() == list(range(1, 9))
        tree.unlock(held)
        assert (tree.protected, tree.evictable) == (0, 8)
        assert sorted(tree.evict(8).tolist()) == list(range(1, 9))

    def test_a_split_copies_standing_to_the_prefix(self) -> None:
        tree = RadixTree(2, lru)
        node = add(tree, [1, 2, 3, 4], [11, 12])
        tree.credit(node)
        tree.promote(node, 7)
        tree.match(A, key(1, 2, 3, 4))
        used = node.last_access
        assert node.split(1).last_access == used > node.created
        prefix = tree.match(A, key(1, 2))
        assert (prefix.hits, prefix.priority, prefix.created) == (1, 7, node.created)
        assert prefix.last_access > node.last_access, "only what matched was used"


class TestLock:
    def test_a_page_is_protected_from_its_first_lock_to_its_last(self) -> None:
        tree = RadixTree(2, lru)
        node = add(tree, [1, 2, 3, 4], [11, 12])
        tree.lock(node)
        tree.unlock(node)
        assert (tree.protected, tree.evictable) == (2, 0)
        tree.unlock(node)
        assert (tree.protected, tree.evictable) == (0, 2)

    def test_a_lock_reaches_to_the_top(self) -> None:
        tree = RadixTree(2, lru)
        put(tree, [1, 2], [11])
        node = add(tree, [1, 2, 3, 4], [21, 12])
        assert node.parent is not None
        assert node.parent.parent is not None
        assert [node.locks, node.parent.locks, node.parent.parent.locks, tree.top.locks] == [1, 1, 1, 1]
        assert tree.protected == 2

    def test_unlock_without_lock_is_refused(self) -> None:
        tree = RadixTree(2, lru)
        put(tree, [1, 2], [11])
        with pytest.raises(IntegrityError, match="not locked"):
            tree.unlock(tree.match(A, key(1, 2)))

    def test_an_evicted_node_cannot_be_locked(self) -> None:
        tree = RadixTree(2, lru)
        put(tree, [1, 2], [11])
        node = tree.match(A, key(1, 2))
        tree.evict(1)
        with pytest.raises(IntegrityError, match="evicted"):
            tree.lock(node)


class TestRoots:
    def test_an_empty_root_goes_with_its_last_page(self) -> None:
        tree = RadixTree(2, lru)
        put(tree, [1, 2], [11], A)
        put(tree, [1, 2], [12], B)
        assert set(tree.top.children) == {A, B}
        tree.evict(1)
        assert set(tree.top.children) == {B}
        tree.evict(1)
        assert not tree.top.children

    def test_a_held_empty_root_stays_until_it_is_let_go(self) -> None:
        tree = RadixTree(2, lru)
        put(tree, [1, 2], [11])
        root = tree.match(A, key(9, 9))
        tree.lock(root)
        tree.evict(1)
        assert A in tree.top.children
        tree.unlock(root)
        assert not tree.top.children

    def test_a_miss_makes_no_root(self) -> None:
        tree = RadixTree(2, lru)
        tree.match(A, key(1, 2))
        assert not tree.top.children
