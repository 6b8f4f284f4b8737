"""Averages of the step times beyond measured costs, for steps with drafts and without."""

from __future__ import annotations

from typing import Final

AVERAGED: Final = 1 / 8
"""Weight of a step in the averages."""
MOST: Final = 4.0
"""Limit on a step's time, as a multiple of what such a step usually takes: more is an accident."""
FELT: Final = 0.1
"""Share of the device's seconds from which on the host counts."""
LOOK: Final = 3
"""Plain steps in a row: before drafting begins, and each time their period is measured again while drafting
is on. The first is not counted: the host is still busy with the result of a drafting step. Two are: where the
loop hears of two results at once, one of them seems to have taken no time."""
BETWEEN: Final = 128
"""Drafting steps between two such measurements."""
RESIZED: Final = 2.0
"""Factor by which the number of rows must grow or shrink for the averages to restart."""


class StepTimes:
    """Averages of what steps take beyond the costs that were measured at the start: attention's reads of KV,
    experts that more tokens wake than those that were measured did, and the host, where the device waits for
    it, as with small models. They differ for steps with drafts and for those without.

    What counts is the time between two results. The host may be late by a step: the first of several steps
    with drafts is counted together with the plain one behind the last, whose usual time is known.

    While all steps have drafts nothing is known of plain ones: where the host is felt, there are some now and
    then.

    Owner: event loop.
    """

    def __init__(self) -> None:
        self._plain = 0.0
        self.more = 0.0
        """Average seconds of a drafting step beyond its costs and `plain`; may be negative."""
        self._weights = [1.0, 1.0]
        """Weights of the next plain step and of the next one with drafts, among steps of about `_rows`
        rows."""
        self._rows = 0
        self._before: bool | None = None
        """Whether the last step had drafts; None: it had prompts, or is unknown."""
        self._first: float | None = None
        """Seconds beyond its costs that the first of the current run of drafting steps took."""
        self._due = LOOK
        self._drafted = 0
        self._felt = False
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
        """Seconds of a plain step beyond its costs."""
        return max(self._plain, 0.0)

    def period(self, busy_at: float) -> float:
        """Seconds since the last result, 0 where the device had nothing to do in between. A result came at
        `busy_at`, while the next step was in flight; 0: none was."""
        before, self._busy_at = self._busy_at, busy_at
        return busy_at - before if before and busy_at else 0.0

    def interrupted(self) -> None:
        """A step had prompts: what is next to it may wait for the host."""
        self._before = self._first = None

    def learn(self, drafts: bool, rows: int, known: float, period: float, seconds: float) -> None:
        """A step of `rows` rows, by its costs of `known` seconds, took the device `seconds`, and its result
        came `period` after the one before, or 0."""
        if not rows / RESIZED <= self._rows <= rows * RESIZED:
            self._resize(rows)
        usual = max(known, seconds) + self.plain + max(self.more, 0.0) * drafts
        beyond = min(period or seconds, MOST * usual) - known
        if drafts == self._before:
            self._average(drafts, beyond)
        elif drafts:
            self._first = beyond
        elif self._first is not None:
            # Never less than it took itself: the plain step may have been shorter for other reasons.
            self._average(True, max(self._first, self._first + beyond - self.plain))
        if not drafts:
            self._first = None
        self._before = drafts
        self._drafted += drafts
        if period and drafts:
            self._felt = period > (1.0 + FELT) * seconds
        if self._drafted >= BETWEEN:
            self._drafted = 0
            self._due = LOOK if self._felt else 0

    def _resize(self, rows: int) -> None:
        """Restart the averages for steps of `rows` rows; the old values are used until new ones arrive. They
        are scaled down if there are fewer rows, because most of the host's work is per row. Otherwise the
        cost of drafts for 64 clients would be charged to a single one, and drafting would not restart."""
        if rows < self._rows:
            share = rows / self._rows
            self._plain, self.more = self._plain * share, self.more * share
        self._rows, self._weights, self._drafted = rows, [1.0, 1.0], 0
        self.interrupted()
        self._due = max(self._due, LOOK if self._felt else 0)

    def _average(self, drafts: bool, beyond: float) -> None:
        """Update the average of what steps take beyond their measured costs, in seconds."""
        weight = self._weights[drafts]
        self._weights[drafts] = max(weight / (1.0 + weight), AVERAGED)
        if drafts:
            self.more += (beyond - self.plain - self.more) * weight
        else:
            self._plain += (beyond - self._plain) * weight
