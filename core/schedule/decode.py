"""Decode rows: one more token for each, a page where one is due, and who goes back when none is left."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from core.cache.manager import CacheManager
from core.request import Request, State
from core.schedule.builder import PlanBuilder
from core.schedule.common import CommonPages
from core.schedule.growth import GrowthRatio
from core.schedule.table import SlotTable
from core.types import NO_TOKENS, Ints


class DecodeRows:
    """The rows that decode, kept from step to step while nothing changes.

    Owner: event loop.
    """

    __slots__ = (
        "_cache",
        "_common",
        "_growth",
        "_mask",
        "_requests",
        "_retract",
        "_shift",
        "_slots",
        "_table",
    )

    def __init__(
        self,
        table: SlotTable,
        cache: CacheManager,
        growth: GrowthRatio,
        retract: Callable[[Request], None],
    ) -> None:
        self._table = table
        self._cache = cache
        self._growth = growth
        self._retract = retract
        self._mask = cache.page_size - 1
        self._shift = self._mask.bit_length()
        self._common = CommonPages()
        self._requests: list[Request] = []
        self._slots: Ints = NO_TOKENS

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, requests: list[Request]) -> None:
        """Rows whose prompt is planned to its end: they decode from the next step on."""
        if requests:
            self._set(self._requests + requests)
            self._common.join(self._requests, requests)

    def remove(self, request: Request) -> None:
        if request in self._requests:
            self._set([r for r in self._requests if r is not request])
            self._common.leave(self._requests)

    def plan(self, builder: PlanBuilder) -> None:
        """Put every row that can take one more token into the step."""
        self._drop_complete()
        if not self._requests:
            return
        table = self._table
        lengths = table.length[self._slots]
        due = np.flatnonzero((lengths & self._mask) == 0)
        requests, slots = self._requests, self._slots
        if len(due):
            pages = self._cache.try_take(len(due))
            if pages is None:
                requests, slots = self._plan_short(builder)
            else:
                self._grow(builder, due, lengths, pages)
        if len(slots):
            table.length[slots] += 1
            builder.decode(requests, slots, self._common.count() << self._shift)
            self._growth.step()

    def _drop_complete(self) -> None:
        """Rows whose last token is planned only wait for their results."""
        table = self._table
        complete = table.length[self._slots] >= table.limit[self._slots]
        if complete.any():
            self._set([r for r, done in zip(self._requests, complete.tolist(), strict=True) if not done])
            self._common.leave(self._requests)

    def _grow(self, builder: PlanBuilder, due: NDArray[np.intp], lengths: Ints, pages: Ints) -> None:
        for row, page in zip(due.tolist(), pages.tolist(), strict=True):
            hold = self._requests[row].hold
            assert hold is not None
            hold.pages.append(page)
        builder.write(self._slots[due], lengths[due] >> self._shift, pages)

    def _plan_short(self, builder: PlanBuilder) -> tuple[list[Request], Ints]:
        """Pages ran out: retract rows until the rest can grow; the last one only if it stands on
        pages that the tree has too, which coming back will spare it.

        A single row that still finds no page sits this step out: whoever holds the pages is about
        to end, and a request that could not fit the pool alone was never accepted.
        """
        while len(self._requests) > 1 or self._doubled():
            self._retract(self._victim())
            self._growth.retracted(
                int(self._table.made[self._slots].sum()),
                int(self._table.most[self._slots].sum()),
                len(self._slots),
            )
            lengths = self._table.length[self._slots]
            due = np.flatnonzero((lengths & self._mask) == 0)
            pages = self._cache.try_take(len(due))
            if pages is not None:
                self._grow(builder, due, lengths, pages)
                return self._requests, self._slots
        lengths = self._table.length[self._slots]
        ready = (lengths & self._mask) != 0
        return [r for r, ok in zip(self._requests, ready.tolist(), strict=True) if ok], self._slots[ready]

    def _doubled(self) -> bool:
        return any(r.hold is not None and r.hold.duplicates for r in self._requests)

    def _victim(self) -> Request:
        """Lowest priority, then the least output to compute again, the most pages back, the youngest."""
        made = self._table.made
        return min(self._requests, key=lambda r: (r.priority, made[r.slot], -len(r.prompt), -r.number))

    def _set(self, requests: list[Request]) -> None:
        self._requests = requests
        self._slots = np.fromiter((r.slot for r in requests), np.int32, len(requests))

    def check(self) -> None:
        """Raise unless every row is a decoding request with its slot."""
        for request, slot in zip(self._requests, self._slots.tolist(), strict=True):
            if request.state is not State.DECODE or request.slot != slot:
                raise RuntimeError(f"decode row {slot} holds {request.id} in {request.state}")
