"""Models that go round in circles."""

from __future__ import annotations

import msgspec

MAX_LENGTH = 128
"""Tokens of a run: each is compared with as many places before it, at 0.05 µs a place."""


class RepetitionScanner:
    """Notices when the last tokens are one run, said over and over.

    For each length it counts how many of the last tokens equal the one that many places before: a run
    of n tokens has been said c times when that holds for the last n * (c - 1). Owner: event loop.
    """

    __slots__ = ("_alike", "_asked", "_tokens")

    def __init__(self, asked: Repetition) -> None:
        self._asked = asked
        self._tokens: list[int] = []
        self._alike = [0] * (asked.longest + 1)

    def feed(self, token: int) -> bool:
        """One more token; whether it completes a run of the length and number asked for."""
        asked, tokens, alike = self._asked, self._tokens, self._alike
        found = False
        for n in range(asked.shortest, min(asked.longest, len(tokens)) + 1):
            alike[n] = alike[n] + 1 if tokens[-n] == token else 0
            found = found or alike[n] >= n * (asked.count - 1)
        tokens.append(token)
        if len(tokens) > asked.longest:
            del tokens[0]
        return found


class Repetition(msgspec.Struct, frozen=True):
    """A run of `shortest` to `longest` tokens that is said `count` times in a row. `longest` >=
    `shortest` >= 1, `count` >= 2."""

    shortest: int
    longest: int
    count: int
