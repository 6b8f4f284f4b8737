"""Reconstructs the contents of a prefix cache from its events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Block(NamedTuple):
    """A page, known by the prefix that it ends."""

    adapter: str
    tokens: tuple[int, ...]


class Follower:
    """The pages of one cache, from its events alone.

    Raises where an event does not follow from those before: a page below an unknown one, stored twice, or
    removed and unknown.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        self._present: Counter[Block] = Counter()
        """API keys may have equal ones."""

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())

    def __len__(self) -> int:
        return len(self._blocks)

    def knows(self, tokens: Sequence[int], adapter: str = "") -> bool:
        """Whether a page that ends these tokens is cached."""
        return Block(adapter, tuple(tokens)) in self._present

    @property
    def prefixes(self) -> Counter[tuple[int, ...]]:
        """Prefixes of all pages, adapters aside."""
        return Counter(each.tokens for each in self._blocks.values())

    def stored(self, adapter: str, parent: int | None, hashes: Sequence[int], tokens: Sequence[int]) -> None:
        """Pages below `parent`."""
        before = () if parent is None else self._blocks[parent].tokens
        assert parent is None or self._blocks[parent].adapter == adapter
        size, rest = divmod(len(tokens), len(hashes))
        assert not rest
        for page, each in enumerate(hashes, 1):
            assert each not in self._blocks
            self._blocks[each] = block = Block(adapter, (*before, *tokens[: page * size]))
            self._present[block] += 1

    def removed(self, hashes: Sequence[int]) -> None:
        """Pages are gone."""
        for each in hashes:
            self._present -= Counter([self._blocks.pop(each)])

    def cleared(self) -> None:
        """All that remain are gone."""
        self._blocks.clear()
        self._present.clear()
