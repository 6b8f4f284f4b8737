"""Pages that admission leaves free, so that running requests need not be retracted soon."""

from __future__ import annotations

from collections.abc import Collection

from core.request import Request
from core.schedule.new_token_ratio import CLIP, NewTokenRatio
from core.schedule.table import SlotTable


class SparePages:
    """Counts these pages. The sum over running requests is kept while a step is planned: computing it again
    for each admitted request took a quarter of the time of an admission. Owner: event loop.
    """

    def __init__(self, table: SlotTable, ratio: NewTokenRatio, page_size: int) -> None:
        self._table = table
        self._ratio = ratio
        self._page_size = page_size
        self._growth: int | None = None
        """Tokens that running requests may still add to the pool, at most `CLIP` of each. None: not known."""

    def begin(self) -> None:
        """Begin the planning of another step. Until the next one, requests only start or advance by what
        `add` and `advance` are told."""
        self._growth = None

    def add(self, request: Request, cached: int) -> None:
        """Count that `request` has started behind its first `cached` tokens."""
        if self._growth is not None:
            self._growth += _growth(request, cached)

    def advance(self, request: Request, start: int, end: int) -> None:
        """Count that the tokens from `start` to `end` of a running request are planned."""
        if self._growth is not None:
            self._growth += _growth(request, end) - _growth(request, start)

    def pages(self, request: Request, gone: Collection[Request] = ()) -> int:
        """Return how many pages to keep free: those that the expected output of `request` and of the running
        requests needs. Requests in `gone` do not count."""
        active = self._table.active
        if gone:
            active = active.copy()
            active[[each.slot for each in gone]] = False
            growth = self._table.growth(active, CLIP)
        elif self._growth is None:
            growth = self._growth = self._table.growth(active, CLIP)
        else:
            growth = self._growth
        if not growth and not active.any():
            return 0
        own = min(request.params.max_tokens - len(request.output), CLIP)
        return int((growth + own) * self._ratio.value) // self._page_size + 1


def _growth(request: Request, planned: int) -> int:
    """Tokens behind the first `planned` ones that need KV, counted up to `CLIP`."""
    return min(max(request.limit - planned, 0), CLIP)
