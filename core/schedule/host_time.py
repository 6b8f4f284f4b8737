"""What the host takes for steps beyond the device, with drafts and without."""

from __future__ import annotations

from typing import Final

AVERAGED: Final = 1 / 8
"""Weight of a step."""
MOST: Final = 4.0
"""Times the device's seconds: more is an accident."""
FELT: Final = 0.1
"""Share of the device's seconds from which on the host counts."""
LOOK: Final = 4
"""Plain steps in a row: before drafting begins, and each time their host time is measured again while
drafting is on. The first is not counted: the host is still busy with the result of a drafting step."""
BETWEEN: Final = 128
"""Drafting steps between two such measurements."""


class HostTime:
    """Results come further apart than the device needs where the host takes longer for a step, as with small
    models. What is between is averaged for plain steps and for those with drafts, which take the host longer.

    While all steps have drafts nothing is known of plain ones: where the host is felt, there are some now and
    then.

    Owner: event loop.
    """

    def __init__(self) -> None:
        self._waits: list[float | None] = [None, None]
        self._due = LOOK
        self._drafted = 0
        self._before = False
        self._busy_at = 0.0

    @property
    def due(self) -> bool:
        """Whether the next step should be a plain one."""
        return self._due > 0

    def planned(self, drafts: bool) -> None:
        """A step was planned, with drafts or without."""
        if not drafts:
            self._due = max(self._due - 1, 0)

    @property
    def plain(self) -> float:
        """Seconds beyond the device's of a plain step."""
        return self._waits[False] or 0.0

    @property
    def more(self) -> float:
        """Seconds that the device waits longer if there are drafts: less than none where these only take some
        of the time that it would wait."""
        plain, drafting = self._waits
        return 0.0 if plain is None or drafting is None else drafting - plain

    def period(self, busy_at: float) -> float:
        """Seconds since the last result, 0 where the device had nothing to do in between. A result came at
        `busy_at`, while the next step was in flight; 0: none was."""
        before, self._busy_at = self._busy_at, busy_at
        return busy_at - before if before and busy_at else 0.0

    def learn(self, drafts: bool, period: float, seconds: float) -> None:
        """A step took the device `seconds`, and its result came `period` after the one before, or 0."""
        alike, self._before = drafts == self._before, drafts
        if alike and period:
            waited = min(max(period - seconds, 0.0), MOST * seconds)
            usual = self._waits[drafts]
            self._waits[drafts] = waited if usual is None else usual + (waited - usual) * AVERAGED
        self._drafted += drafts
        if self._drafted >= BETWEEN:
            self._drafted = 0
            felt = max(self._waits[True] or 0.0, self.plain) > FELT * seconds
            self._due = LOOK if felt else 0
