"""Steps in flight: what plans assumed, to be held against what results confirm."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from core.request import Request
from core.types import Ints, NDArray64


class ChunkFlight(NamedTuple):
    """A prompt chunk whose answer matters. `ends`: the request is complete with it."""

    request: Request
    slot: int
    epoch: int
    ends: bool


class Flight(NamedTuple):
    """One submitted step. `rows`, `slots`, `epochs` are its sampling rows in plan order; `chunks`
    the prompt chunks that owe prompt logprobs, hidden states or experts, or end a prompt that wants no
    token."""

    step: int
    rows: list[Request]
    slots: Ints
    epochs: NDArray64
    chunks: list[ChunkFlight]


class Ledger:
    """First in, first out: executors answer in the order of submission. Owner: event loop."""

    __slots__ = ("_flights",)

    def __init__(self) -> None:
        self._flights: deque[Flight] = deque()

    def __len__(self) -> int:
        return len(self._flights)

    def add(self, flight: Flight) -> None:
        self._flights.append(flight)

    def confirm(self, step: int) -> Flight:
        """The flight that `step` answers; another order is a broken executor and raises."""
        flight = self._flights.popleft()
        if flight.step != step:
            raise RuntimeError(f"step {step} was answered before step {flight.step}")
        return flight
