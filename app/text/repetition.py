"""Detects an output that repeats itself."""

from __future__ import annotations

import msgspec

MAX_LENGTH = 128
"""Tokens of a run: each is compared with as many places before it, at 0.05 µs a place."""


class RepetitionScanner:
    """Detects that the last tokens are one run, repeated.

    For each length it counts how many of the last tokens equal the one that many places before: a run
    of n tokens is repeated c times when that holds for the last n * (c - 1). Owner: event loop.
    """

    def __init__(self, wanted: Repetition) -> None:
        self._wanted = wanted
        self._tokens: list[int] = []
        self._matches = [0] * (wanted.longest + 1)

    def feed(self, token: int) -> bool:
        """Add one more token. Returns whether it completes such a repetition."""
        wanted, tokens, matches = self._wanted, self._tokens, self._matches
        found = False
        for n in range(wanted.shortest, min(wanted.longest, len(tokens)) + 1):
            matches[n] = matches[n] + 1 if tokens[-n] == token else 0
            found = found or matches[n] >= n * (wanted.count - 1)
        tokens.append(token)
        if len(tokens) > wanted.longest:
            del tokens[0]
        return found


class Repetition(msgspec.Struct, frozen=True):
    """A run of `shortest` to `longest` tokens that occurs `count` times in a row. `longest` >=
    `shortest` >= 1, `count` >= 2."""

    shortest: int
    longest: int
    count: int
