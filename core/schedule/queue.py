"""Requests that wait."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain, takewhile
from typing import NoReturn

from core.errors import Overloaded
from core.request import Request
from core.schedule.callers import Callers


class Waiting:
    """Queue of requests in order of arrival, retracted ones in front; removal of any one is O(1).

    A retracted request is queued from its retraction on, though it can start only after its in-flight tokens
    have arrived: requests behind it would otherwise take its pages in the meantime.

    Owner: event loop.
    """

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._arrived: OrderedDict[Request, None] = OrderedDict()
        self._returned: dict[Request, None] = {}
        self.callers = Callers()
        self.lines: dict[str, dict[Request, None]] = {}
        """The waiting requests of each caller that were never scheduled, in order of arrival."""
        self.adapters: dict[str, dict[Request, None]] = {}
        """The requests of each adapter."""
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._number = 0
        self.prompts: dict[str, int] = {}
        """Tokens to compute for the requests in `lines`, by caller."""
        self.refused: Counter[str] = Counter()
        """Requests by the reason why they were not taken."""

    def __len__(self) -> int:
        return len(self._arrived) + len(self._returned)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._returned, self._arrived)

    @property
    def retracted(self) -> list[Request]:
        """Requests that ran already."""
        return list(self._returned)

    @property
    def tokens(self) -> int:
        """Tokens to compute if nothing is cached."""
        return sum(self.prompts.values()) + self.retracted_tokens

    @property
    def retracted_tokens(self) -> int:
        """Tokens to compute of the `retracted` requests if nothing is cached."""
        return sum(request.num_tokens for request in self._returned)

    def check_room(self, requests: Sequence[Request]) -> None:
        """Raise `Overloaded` if these requests would exceed a limit. An empty queue accepts any one job, and
        the limits do not apply to requests that continue an answer."""
        waiting = 0 if any(r.continues for r in requests) else len(self)
        if waiting and waiting + len(requests) > self._max_requests:
            self.refuse("queue_requests", f"The request queue is full ({waiting} waiting).")
        if waiting and self.tokens + sum(len(r.prompt) for r in requests) > self._max_tokens:
            self.refuse("queue_tokens", f"The request queue is full ({self.tokens} tokens waiting).")

    def refuse(self, reason: str, message: str, seconds: float = 1.0) -> NoReturn:
        """Count a rejected job and raise `Overloaded`; the client may retry after `seconds`."""
        self.refused[reason] += 1
        raise Overloaded(f"{message} Try again later.", seconds)

    def append(self, request: Request, now: float) -> None:
        request.number, self._number = self._number, self._number + 1
        request.since = now
        self.callers.enter(request.caller)
        self._count([request])
        if request.continues:
            self._returned[request] = None
            return
        self._arrived[request] = None
        self.lines.setdefault(request.caller, {})[request] = None
        self.prompts[request.caller] = self.prompts.get(request.caller, 0) + request.to_compute

    def put_back(self, requests: list[Request], now: float) -> None:
        """Queue retracted requests in front, in order of arrival."""
        for request in requests:
            request.since = now
        returned = [*self._returned, *requests]
        self._returned = dict.fromkeys(sorted(returned, key=lambda r: r.number))
        self._count(requests)

    def _count(self, requests: list[Request]) -> None:
        for request in requests:
            if request.root.adapter:
                self.adapters.setdefault(request.root.adapter, {})[request] = None

    def remove(self, request: Request) -> None:
        """Remove a waiting request. Raises `KeyError` for one that is not here."""
        if request in self._returned:
            del self._returned[request]
        else:
            del self._arrived[request]
            _drop(self.lines, request.caller, request)
            self.prompts[request.caller] -= request.to_compute
            if request.caller not in self.lines:
                del self.prompts[request.caller]
        if request.root.adapter:
            _drop(self.adapters, request.root.adapter, request)

    def overdue(self, most: int) -> int:
        """Number of requests at the head of the queue that ran already or have been overtaken by at least
        `most` later arrivals. Of two waiting requests the later one was overtaken less often."""
        waiting = len(self._arrived)
        # Of all that came after a request, those that wait still are behind it; the others overtook it.
        overtaken = (self._number - r.number - (waiting - at) for at, r in enumerate(self._arrived))
        return len(self._returned) + sum(1 for _ in takewhile(lambda times: times >= most, overtaken))

    def late(self, since: float) -> list[Request]:
        """Requests that have waited for their first token since before `since`."""
        returned = [r for r in self._returned if r.since < since and not (r.output or r.continues)]
        return returned + list(takewhile(lambda r: r.since < since, self._arrived))


def _drop(groups: dict[str, dict[Request, None]], name: str, request: Request) -> None:
    """Remove a request from the group of that name, and the group with its last request."""
    del groups[name][request]
    if not groups[name]:
        del groups[name]
