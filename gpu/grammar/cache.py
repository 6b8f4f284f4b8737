"""Compiled grammars by their text, bounded by bytes."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from gpu.grammar.stepper import Grammar

_ENTRY = 500
"""Bytes of an entry besides its texts and its grammar."""


class Key(NamedTuple):
    """What makes two constraints the same."""

    kind: str
    text: str
    lenient: bool = False
    """Its schemas may ask for more than is held, with warnings."""


class Refusal(NamedTuple):
    """A constraint that does not compile: kept too, or each try of a hostile one would cost 5 s."""

    message: str


class GrammarCache:
    """Least recently used goes first. Owner: event loop."""

    def __init__(self, limit: int) -> None:
        self._entries: OrderedDict[Key, Grammar | Refusal] = OrderedDict()
        self._limit = limit
        self.size = 0

    def get(self, key: Key) -> Grammar | Refusal | None:
        """What is known of `key`, now the most recently used. Broken grammars are forgotten."""
        found = self._entries.get(key)
        if isinstance(found, Grammar) and found.broken:
            self.size -= _weight(key, self._entries.pop(key))
            return None
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: Key, found: Grammar | Refusal) -> None:
        """Keep it, and drop others until it fits. What is larger than the cache is not kept."""
        weight = _weight(key, found)
        if weight > self._limit or key in self._entries:
            return
        self._entries[key] = found
        self.size += weight
        while self.size > self._limit:
            self.size -= _weight(*self._entries.popitem(last=False))


def _weight(key: Key, found: Grammar | Refusal) -> int:
    held = found.size if isinstance(found, Grammar) else len(found.message)
    return _ENTRY + 4 * len(key.text) + held
