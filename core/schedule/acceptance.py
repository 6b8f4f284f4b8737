"""How often drafts are accepted, by their position, as results tell."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from core.types import Ints

MEMORY: Final = 64
"""Number of drafts over which a position's acceptance is averaged. A step of many rows has that many."""
FADING: Final = 127 / 128
"""Each step multiplies the weight of all earlier steps by this, so that an average which was not updated for
long is soon corrected."""
LEAST_WEIGHT: Final = 2.0
"""Minimum weight of the first position's acceptance, in drafts. Other positions have no minimum."""
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
    """Averages over the drafts at each position of a row, in lists: there are few positions, and arrays of so
    few numbers take several times as long. Owner: event loop."""

    def __init__(self, most: int) -> None:
        """`most` drafts a row."""
        self._most = most
        self._least = [0.0 if j else LEAST_WEIGHT for j in range(most)]
        self._tried = list(self._least)
        self._accepted = [least * FIRST_GUESS for least in self._least]
        self._trees = False
        """Whether drafts are nodes of trees, each with an acceptance of its own."""
        self._ready = [1.0] * most
        """Share of rows that have a draft at each position."""

    def expected(self, able: int) -> tuple[list[float], list[float]]:
        """How many drafts `able` rows have, and how many of these are accepted, if each row may have at most
        0, 1 ... `most` drafts."""
        drafts, tokens = [0.0], [0.0]
        for share, survives in zip(self._ready, self.survival(), strict=True):
            drafts.append(drafts[-1] + able * share)
            tokens.append(tokens[-1] + able * share * survives)
        return drafts, tokens

    def survival(self) -> list[float]:
        """The probability [most] that a row's draft at each position and all before it are accepted, or of a
        tree all on its path. What was never tried is as likely as what is before it."""
        found, before, survives = list[float](), FIRST_GUESS, 1.0
        for j, (tried, accepted) in enumerate(zip(self._tried, self._accepted, strict=True)):
            if self._trees and j:
                survives = (accepted + survives * FIRST_GUESS) / (tried + 1.0)
            else:
                before = accepted / tried if j == 0 else (accepted + before) / (tried + 1.0)
                survives *= before
            found.append(survives)
        return found

    def fade(self, steps: int) -> None:
        """Decay the averages by this number of steps."""
        left = FADING**steps
        for j, least in enumerate(self._least):
            if self._tried[j] > least:
                self._tried[j] *= left
                self._accepted[j] *= left

    def count(self, steps: list[Verified]) -> None:
        """Add the results of `steps`, at least one."""
        taken = np.concatenate([step.taken for step in steps])
        drafted = np.concatenate([step.drafted for step in steps])
        own = [step.paths for step in steps if step.paths is not None]
        self._trees = bool(own)
        had, accepted, rejected = _by_position(taken, drafted, self._most)
        if own:
            accepted = (np.concatenate(own)[:, None] >> np.arange(self._most) & 1).sum(0).tolist()
        for j, right in enumerate(accepted):
            tried = had[j] if own else right + rejected[j]
            kept = MEMORY / (MEMORY + tried)
            self._tried[j] = self._tried[j] * kept + tried
            self._accepted[j] = self._accepted[j] * kept + right
        able = sum(step.able for step in steps)
        # Where all were used there may have been more.
        short = sum(had) < sum(step.drafts for step in steps)
        weight = 1.0 - (1.0 - READINESS) ** len(steps)
        for j, rows in enumerate(had):
            self._ready[j] += ((rows / able if short else 1.0) - self._ready[j]) * weight


def _by_position(taken: Ints, drafted: Ints, most: int) -> tuple[list[int], list[int], list[int]]:
    """For each position, up to `most`: the number of rows that had this draft, that had it accepted, and
    whose first rejected draft it was. One count of pairs, then few sums: a third of the time of arrays."""
    had, accepted, rejected = [0] * (most + 1), [0] * (most + 1), [0] * (most + 1)
    width = most + 1
    cells = np.bincount(drafted * width + np.maximum(taken, 0), minlength=width * width).tolist()
    for cell, rows in enumerate(cells):
        if rows:
            length, right = divmod(cell, width)
            had[length] += rows
            accepted[right] += rows
            rejected[right] += rows * (right < length)
    for j in range(most - 1, 0, -1):
        had[j] += had[j + 1]
        accepted[j] += accepted[j + 1]
    return had[1:], accepted[1:], rejected[:most]
