"""The pages that all decode rows begin with: attention reads them once for all rows (cascade attention)."""

from __future__ import annotations

from collections.abc import Sequence

from core.request import Request


class SharedPrefix:
    """Number of leading pages that all rows share: a lower bound that is exact most of the time.

    A row that joins can only shorten it, which is checked against one row. A row that leaves can only
    lengthen it, which takes a look at all others: that is done once in as many changes as there are rows, so
    that a change costs the same however many run.

    Owner: event loop.
    """

    def __init__(self) -> None:
        self._count = 0
        self._changes = 0
        self._first: Request | None = None
        """The row that others are compared with; its pages are known to begin with the shared ones."""

    def count(self) -> int:
        """Number of shared pages; 0 while less than two rows run."""
        return self._count

    def join(self, rows: Sequence[Request], joined: Sequence[Request]) -> None:
        """Update the count for `rows`, of which `joined` are new."""
        first = self._first
        alone = len(rows) - len(joined) < 2  # a row alone shares nothing that could be shortened
        if first is None or alone or self._due(rows, len(joined)):
            self._recount(rows)
            return
        for row in joined:
            self._count = _shared(first, row, self._count)

    def leave(self, rows: Sequence[Request]) -> None:
        """Update the count when only `rows` remain. What they shared with the others, they share among
        themselves."""
        if len(rows) < 2 or self._due(rows, 1):
            self._recount(rows)
        else:
            self._first = rows[0]

    def _due(self, rows: Sequence[Request], changes: int) -> bool:
        self._changes += changes
        return self._changes >= len(rows)

    def _recount(self, rows: Sequence[Request]) -> None:
        self._changes = 0
        self._first = rows[0] if rows else None
        self._count = 0
        if len(rows) > 1:
            count = len(_pages(rows[0]))
            for row in rows[1:]:
                count = _shared(rows[0], row, count)
            self._count = count


def _pages(row: Request) -> list[int]:
    assert row.hold is not None, "a decode row holds its pages"
    return row.hold.pages


def _shared(first: Request, row: Request, most: int) -> int:
    """Number of leading pages, at most `most`, that both requests have, by binary search."""
    ours, theirs = _pages(first), _pages(row)
    most = min(most, len(theirs))
    if ours[:most] == theirs[:most]:
        return most
    low, high = 0, most  # the first `low` are equal, the first `high` are not
    while high - low > 1:
        middle = (low + high) // 2
        if ours[low:middle] == theirs[low:middle]:
            low = middle
        else:
            high = middle
    return low
