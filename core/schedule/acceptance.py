"""How often drafts are accepted, by their position, as results tell."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from core.types import Ints

MEMORY: Final = 64
"""Drafts over which a position's acceptance is averaged: a step of many rows has as many."""
FADING: Final = 127 / 128
"""What a step leaves of the weight of all before it: what has not been tried for long is soon corrected."""
LEAST_WEIGHT: Final = 2.0
"""Drafts that the acceptance of the first position weighs at least; that of others fades away."""
FIRST_GUESS: Final = 0.7
"""Acceptance of a draft before any was verified."""
READINESS: Final = 1 / 8
"""Weight of a step's share of rows that had drafts."""


class Verified(NamedTuple):
    """Result of a step that could verify up to `drafts` drafts of `able` rows: accepted (`taken`) and drafted
    tokens by row. `paths` of trees: by row, a bit for each accepted node."""

    drafts: int
    able: int
    taken: Ints
    drafted: Ints
    paths: Ints | None


class Acceptance:
    """Averages over the drafts at each position of a row. Owner: event loop."""

    def __init__(self, most: int) -> None:
        """`most` drafts a row."""
        self._most = most
        self._least = np.where(np.arange(most) > 0, 0.0, LEAST_WEIGHT)
        self._tried = self._least.copy()
        self._accepted = self._least * FIRST_GUESS
        self._trees = False
        """Whether drafts are nodes of trees, each with an acceptance of its own."""
        self.ready = np.ones(most)
        """Share of rows that have a draft at each position."""

    def survival(self) -> NDArray[np.float64]:
        """The probability [most] that a row's draft at each position and all before it are accepted, or of a
        tree all on its path. What was never tried is as likely as what is before it."""
        found, before, survives = np.empty(self._most), FIRST_GUESS, 1.0
        counts = zip(self._tried.tolist(), self._accepted.tolist(), strict=True)
        for j, (tried, accepted) in enumerate(counts):
            if self._trees and j:
                found[j] = survives = (accepted + survives * FIRST_GUESS) / (tried + 1.0)
                continue
            before = accepted / tried if j == 0 else (accepted + before) / (tried + 1.0)
            found[j] = survives = survives * before
        return found

    def fade(self, steps: int) -> None:
        """So many steps have passed."""
        fading = np.where(self._tried > self._least, FADING**steps, 1.0)
        self._tried *= fading
        self._accepted *= fading

    def count(self, steps: list[Verified]) -> None:
        """What these verified, one step at least."""
        taken = np.concatenate([step.taken for step in steps])
        drafted = np.concatenate([step.drafted for step in steps])
        own = [step.paths for step in steps if step.paths is not None]
        paths = np.concatenate(own) if own else None
        self._trees = paths is not None
        if paths is None:
            accepted = _reaching(taken, self._most)
            tried = accepted + np.bincount(taken[taken < drafted].clip(0), minlength=self._most)[: self._most]
        else:
            tried = _reaching(drafted, self._most)
            accepted = (paths[:, None] >> np.arange(self._most) & 1).sum(0).astype(np.float64)
        kept = MEMORY / (MEMORY + tried)
        self._tried = self._tried * kept + tried
        self._accepted = self._accepted * kept + accepted
        # Where all were used there may have been more.
        short = drafted.sum() < sum(step.drafts for step in steps)
        shares = _reaching(drafted, self._most) / sum(step.able for step in steps) if short else 1.0
        self.ready += (shares - self.ready) * (1.0 - (1.0 - READINESS) ** len(steps))


def _reaching(counts: Ints, most: int) -> NDArray[np.float64]:
    """How many of `counts` are at least 1 ... `most`."""
    each = np.bincount(counts.clip(0, most), minlength=most + 1)
    found: NDArray[np.float64] = np.cumsum(each[::-1])[::-1][1:].astype(np.float64)
    return found
