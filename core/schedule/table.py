"""The host's columns of the slots, as numpy arrays: planning 512 steady rows is a handful of vector
operations."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from core.plan import MASKED_DRAFTS
from core.request import Request, State
from core.types import Ints, NDArray64


class SlotTable:
    """Slots 1 ... max_rows; slot 0 is the dump and never taken.

    Owner: event loop. How many tokens' KV submitted steps write depends, for steps in flight, on the drafts
    that they accept: `least` counts one token for each such step, `most` the whole query. `limit` counts the
    tokens that ever need KV, `room` those that the slot's pages have a place for. `active` is true where the
    slot's request prefills or decodes: a retracted one keeps its slot until its tokens have arrived.
    `drafting` is 1 where the slot may have drafts, `masked` where it has a grammar, `adapted` where it has an
    adapter. `made` counts confirmed output tokens of at most `max_tokens`, `in_flight` answers that submitted
    steps still owe it. `epoch` changes whenever a slot is freed, so that a late result cannot be taken for
    the slot's next owner.
    """

    def __init__(self, max_rows: int, max_drafts: int = 0, masked_drafts: int = MASKED_DRAFTS) -> None:
        rows = max_rows + 1
        self._max_drafts = max_drafts
        self._masked_drafts = masked_drafts
        # In turn: what a slot keeps of its former requests (`gpu.state.served`) lasts the longer.
        self._free = deque(range(1, rows))
        self.requests: list[Request | None] = [None] * rows
        self.active = np.zeros(rows, np.bool_)
        self.least = np.zeros(rows, np.int32)
        self.most = np.zeros(rows, np.int32)
        self.limit = np.zeros(rows, np.int32)
        self.room = np.zeros(rows, np.int32)
        self.made = np.zeros(rows, np.int32)
        self.max_tokens = np.zeros(rows, np.int32)
        self.drafting = np.zeros(rows, np.int32)
        self.masked = np.zeros(rows, np.int32)
        self.adapted = np.zeros(rows, np.bool_)
        self.in_flight = np.zeros(rows, np.int32)
        self.epoch = np.zeros(rows, np.int64)

    @property
    def free(self) -> int:
        """Slots that could be taken now."""
        return len(self._free)

    def running(self) -> Iterator[Request]:
        """Requests that prefill or decode."""
        return (r for r in self.requests if r is not None and r.state is not State.RETRACTED)

    def take(self, request: Request, cached: int, room: int) -> int:
        """Give `request` a slot whose length starts at `cached`, on pages with `room`. One must be free."""
        slot = self._free.popleft()
        request.slot = slot
        self.requests[slot] = request
        self.active[slot] = True
        self.least[slot] = self.most[slot] = cached
        self.limit[slot] = request.limit
        self.room[slot] = room
        self.made[slot] = len(request.output)
        self.max_tokens[slot] = request.params.max_tokens
        self.masked[slot] = request.grammar is not None
        self.drafting[slot] = self._may_draft(request)
        self.adapted[slot] = request.root.adapter != ""
        self.in_flight[slot] = 0
        return slot

    def _may_draft(self, request: Request) -> bool:
        """Whether a request may have drafts: not with a logit processor, which is called with the token
        before; nor with a grammar while as many draft as there may be."""
        if request.params.processor or request.grammar is None:
            return not request.params.processor
        masked = int((self.drafting & self.masked).sum())
        return (1 + masked) * self._max_drafts <= self._masked_drafts

    def retract(self, request: Request) -> None:
        """The request has no pages any more; its slot waits for what is in flight."""
        self.active[request.slot] = False

    def release(self, request: Request) -> None:
        """Free the slot; results still in flight for it will find another epoch."""
        slot = request.slot
        self.requests[slot] = None
        self.active[slot] = False
        self.epoch[slot] += 1
        self.in_flight[slot] = self.drafting[slot] = self.adapted[slot] = 0
        self._free.append(slot)
        request.slot = 0

    def has_adapter(self, slots: NDArray64) -> bool:
        """Whether any of the slots has an adapter."""
        return bool(self.adapted.any()) and bool(self.adapted[slots].any())

    def growth(self, counted: NDArray[np.bool_], clip: int) -> int:
        """Return how many tokens the slots that `counted` marks may still add to the pool, at most `clip`
        each."""
        return int((self.limit[counted] - self.least[counted]).clip(0, clip).sum())

    def queries(self, slots: NDArray64, query_length: int) -> Ints | int:
        """Upper bound of each slot's query tokens in a step with this `query_length`; 1 for slots without
        drafts."""
        return 1 + (query_length - 1) * self.drafting[slots] if query_length > 1 else 1

    def lacking(self, slots: NDArray64, query_length: int) -> Ints:
        """Tokens of such queries for which each of `slots` has no page; 0 or less: none."""
        tokens = self.most[slots] + self.queries(slots, query_length)
        found: Ints = np.minimum(tokens, self.limit[slots]) - self.room[slots]
        return found

    def written(self, request: Request) -> int:
        """Tokens of the request whose KV is in its pages when the steps submitted so far have run."""
        slot = request.slot
        return int(min(self.least[slot], self.limit[slot]))
