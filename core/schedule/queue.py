"""Requests that wait."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from core.errors import Overloaded
from core.request import Request


class Waiting:
    """In order of arrival, retracted requests in front; removal of any one is O(1).

    Owner: event loop. `tokens` is the sum of the waiting prompts.
    """

    __slots__ = ("_max_requests", "_max_tokens", "_requests", "tokens")

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def check_room(self, requests: int, tokens: int) -> None:
        """Raise `Overloaded` when so many more would pass a bound. An empty queue takes any one job."""
        if self._requests and len(self) + requests > self._max_requests:
            raise Overloaded(f"The request queue is full ({len(self)} waiting). Try again later.")
        if self._requests and self.tokens + tokens > self._max_tokens:
            raise Overloaded(f"The request queue is full ({self.tokens} tokens waiting). Try again later.")

    def append(self, request: Request) -> None:
        self._requests[request.id] = request
        self.tokens += request.num_tokens

    def put_back(self, request: Request) -> None:
        """A request that ran already goes first."""
        self.append(request)
        self._requests.move_to_end(request.id, last=False)

    def remove(self, request: Request) -> None:
        del self._requests[request.id]
        self.tokens -= request.num_tokens
