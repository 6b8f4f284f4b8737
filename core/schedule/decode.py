"""Decode rows: more tokens for each, pages where they are due, and retraction when none are left."""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from core.cache.manager import CacheManager
from core.request import Request, State
from core.schedule.builder import PlanBuilder
from core.schedule.new_token_ratio import NewTokenRatio
from core.schedule.shared_prefix import SharedPrefix
from core.schedule.speculation import NO_DRAFTS, DraftBudget, Grant
from core.schedule.table import SlotTable
from core.types import Ints, NDArray64


class DecodeRows:
    """The decode rows, kept from step to step while nothing changes.

    Owner: event loop.
    """

    def __init__(
        self,
        table: SlotTable,
        cache: CacheManager,
        new_token_ratio: NewTokenRatio,
        budget: DraftBudget,
        retract: Callable[[Request], None],
    ) -> None:
        self._table = table
        self._cache = cache
        self._new_token_ratio = new_token_ratio
        self._retract = retract
        self._budget = budget
        self._shift = (cache.page_size - 1).bit_length()
        self._shared_prefix = SharedPrefix()
        self._requests: list[Request] = []
        self._slots: NDArray64 = np.zeros(0, np.int64)
        self._left: set[Request] = set()
        """Requests that ended or were retracted since the last `_drop`. Rows are removed together, because
        removing one of 512 takes 40 µs."""
        self._able = 0
        """Rows that may have drafts."""

    def add(self, requests: list[Request]) -> None:
        """Rows whose prompt is planned to its end: they decode from the next step on."""
        self._drop()
        if requests:
            slots = np.array([request.slot for request in requests], np.int64)
            self._set(self._requests + requests, np.concatenate((self._slots, slots)))
            self._shared_prefix.join(self._requests, requests)

    def remove(self, request: Request) -> None:
        """Forget a request that ended or was retracted; it need not be a row."""
        self._left.add(request)

    def plan(self, builder: PlanBuilder) -> None:
        """Put every row that can take one more token into the step, with drafts where there is room."""
        self._drop()
        if not self._requests:
            return
        requests, slots = self._requests, self._slots
        grant = self._grant(builder)
        # A draft model writes KV ahead of the tokens: its rows have pages for drafts that are proposed, too.
        drafting = bool(grant.drafts or grant.proposes)
        if drafting and not self._take_pages(builder, 1 + grant.longest):
            drafting, grant = False, NO_DRAFTS
        if not drafting and not self._take_pages(builder, 1):
            requests, slots = self._plan_short(builder)
        if len(slots):
            queries = self._table.queries(slots, grant.query_length)
            if self._cache.interval:
                self._save(builder, requests, slots, queries)
            self._table.least[slots] += 1
            self._table.most[slots] += queries
            builder.decode(requests, slots, self._shared_prefix.count() << self._shift, grant)
            self._new_token_ratio.step()

    def _save(
        self, builder: PlanBuilder, requests: list[Request], slots: NDArray64, queries: Ints | int
    ) -> None:
        """Keep the states of rows that may reach the next multiple of the interval in this step.

        While it is not known how many drafts are accepted, several steps may be the one, and each is told. A
        multiple that a step may have passed untold has no checkpoint.
        """
        table, interval = self._table, self._cache.interval
        least, most = table.least[slots], table.most[slots]
        due = (least // interval + 1) * interval
        for row in np.flatnonzero(due <= np.minimum(most + queries, table.limit[slots])).tolist():
            hold, count = requests[row].hold, int(due[row])
            assert hold is not None
            builder.save(int(slots[row]), count, self._cache.save_ahead(hold, count, count > most[row]))

    def _grant(self, builder: PlanBuilder) -> Grant:
        """Drafts of the whole step. Prompts keep at least half of the tokens beside the rows."""
        if not self._budget.most:
            return NO_DRAFTS
        rows = len(self._requests)
        return self._budget.grant(rows, self._able, min((builder.room - rows) // 2, builder.samples - rows))

    def _drop(self) -> None:
        """Remove the rows of requests that left, and rows whose last token is already planned even if no
        draft is accepted: these only wait for results."""
        table, rows, slots = self._table, self._requests, self._slots
        kept = table.least[slots] < table.limit[slots]
        if self._left:
            left, self._left = self._left, set()
            kept &= np.array([request not in left for request in rows], np.bool_)
        if not kept.all():
            self._set(list(compress(rows, kept.tolist())), slots[kept])
            self._shared_prefix.leave(self._requests)

    def _take_pages(self, builder: PlanBuilder, query_length: int) -> bool:
        """Give every row pages for a query of at most `query_length`; False, with nothing changed, when there
        are too few."""
        table, slots = self._table, self._slots
        lacking = table.lacking(slots, query_length)
        due = np.flatnonzero(lacking > 0)
        if not len(due):
            return True
        # For one token a page is enough, whatever the size of pages.
        count = len(due) if query_length == 1 else int(-(-lacking[due] >> self._shift).sum())
        pages = self._cache.try_take(count)
        if pages is None:
            return False
        while True:
            self._grow(builder, due, pages[: len(due)])
            pages = pages[len(due) :]
            if not len(pages):
                return True
            due = due[table.lacking(slots[due], query_length) > 0]

    def _grow(self, builder: PlanBuilder, due: NDArray[np.intp], pages: Ints) -> None:
        """A page for each of the rows `due`."""
        for row, page in zip(due.tolist(), pages.tolist(), strict=True):
            hold = self._requests[row].hold
            assert hold is not None
            hold.pages.append(page)
        slots = self._slots[due]
        builder.write(slots.astype(np.int32), self._table.room[slots] >> self._shift, pages)
        self._table.room[slots] += self._cache.page_size

    def _plan_short(self, builder: PlanBuilder) -> tuple[list[Request], NDArray64]:
        """Pages ran out: retract rows until the rest can grow; the last one only if it stands on
        pages that the tree has too, which coming back will spare it.

        Nobody is retracted while drafts are in flight: those that are not accepted leave room, and the rows
        that lack it wait. So does a single row that still finds no page: the requests that hold the pages are
        about to end, and a request that could not fit the pool alone was never accepted.
        """
        table = self._table
        while not self._drafting() and (len(self._requests) > 1 or self._has_duplicates()):
            self._retract(self._victim())
            self._drop()
            self._new_token_ratio.retracted(
                int(table.made[self._slots].sum()), int(table.max_tokens[self._slots].sum()), len(self._slots)
            )
            if self._take_pages(builder, 1):
                return self._requests, self._slots
        ready = table.lacking(self._slots, 1) <= 0
        return [r for r, ok in zip(self._requests, ready.tolist(), strict=True) if ok], self._slots[ready]

    def _drafting(self) -> bool:
        """Whether drafts of these rows are in flight."""
        return bool((self._table.most[self._slots] > self._table.least[self._slots]).any())

    def _has_duplicates(self) -> bool:
        return any(r.hold is not None and r.hold.duplicates for r in self._requests)

    def _victim(self) -> Request:
        """The row to retract: lowest priority, then least output to recompute, most pages freed, youngest."""
        made = self._table.made
        return min(self._requests, key=lambda r: (r.priority, made[r.slot], -len(r.prompt), -r.number))

    def _set(self, requests: list[Request], slots: NDArray64) -> None:
        self._requests, self._slots = requests, slots
        self._able = int(self._table.drafting[slots].sum()) if self._budget.most else 0

    def check(self) -> None:
        """Raise unless every row is a decoding request with its slot."""
        self._drop()
        for request, slot in zip(self._requests, self._slots.tolist(), strict=True):
            if request.state is not State.DECODE or request.slot != slot:
                raise RuntimeError(f"decode row {slot} holds {request.id} in {request.state}")
