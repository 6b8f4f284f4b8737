"""Steps in flight: what plans assumed of lengths, corrected by results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from core.plan import RowLogprobs, StepResult
from core.request import Request
from core.schedule.speculation import Grant
from core.schedule.table import SlotTable
from core.types import Ints, NDArray64

V = TypeVar("V")


class InFlightChunk(NamedTuple):
    """A prompt chunk whose result is needed. `ends`: the request is complete with it."""

    request: Request
    slot: int
    epoch: int
    ends: bool


class InFlightStep(NamedTuple):
    """One submitted step. `rows`, `slots`, `epochs` are its sampling rows in plan order; `chunks`
    the prompt chunks that report prompt logprobs, hidden states or experts, or end a request without
    output. The first `decoding` rows have the drafts of `grant`, the others are chunks; all chunks have
    `prompts` tokens."""

    step: int
    rows: list[Request]
    slots: NDArray64
    epochs: NDArray64
    chunks: list[InFlightChunk]
    decoding: int
    prompts: int
    grant: Grant


class Arrived(NamedTuple):
    """Tokens of one result in row order, with the request and the slot of each: a request is there once for
    every token of its row. `logprobs` and `failed` are by index in `tokens`."""

    requests: list[Request]
    slots: NDArray64
    tokens: Ints
    logprobs: dict[int, RowLogprobs]
    failed: dict[int, str]

    def kept(self, keep: list[int]) -> Arrived:
        """The tokens at the indices `keep`."""
        return Arrived(
            [self.requests[at] for at in keep],
            self.slots[keep],
            self.tokens[keep],
            renumbered(self.logprobs, keep),
            renumbered(self.failed, keep),
        )

    def last(self, at: int) -> int:
        """Index of the last token of the row that the one at `at` is of."""
        requests = self.requests
        while at + 1 < len(requests) and requests[at + 1] is requests[at]:
            at += 1
        return at


def renumbered(values: Mapping[int, V], keep: Sequence[int]) -> dict[int, V]:
    """`values` at the indices `keep`, renumbered by position in `keep`."""
    return {new: values[old] for new, old in enumerate(keep) if old in values} if values else {}


def arrive(flight: InFlightStep, result: StepResult, table: SlotTable) -> Arrived:
    """The tokens of `result` whose requests are still here. Corrects in `table` the lengths that the plan
    assumed."""
    arrived = Arrived(flight.rows, flight.slots, result.tokens, result.logprobs, result.failed)
    alive = table.epoch[flight.slots] == flight.epochs
    slots = flight.slots if (whole := alive.all()) else flight.slots[alive]
    table.in_flight[slots] -= 1
    if result.counts is None and not flight.grant.drafts:
        table.made[slots] += 1
    else:
        rows = len(flight.slots)
        counts = np.ones(rows, np.int32) if result.counts is None else result.counts
        assumed = np.ones(rows, np.int32)
        assumed[: flight.decoding] = table.queries(flight.slots[: flight.decoding], flight.grant.query_length)
        table.made[slots] += counts[alive]
        table.least[slots] += counts[alive] - 1
        table.most[slots] += (counts - assumed)[alive]
        if (drafted := result.drafted) is not None:
            at = (drafted * alive).nonzero()[0]
            for row, own, made in zip(at.tolist(), drafted[at].tolist(), counts[at].tolist(), strict=True):
                request = flight.rows[row]
                request.drafts.verified(own, made, len(request.output))
        row_of = np.repeat(np.arange(rows), counts)
        arrived = arrived._replace(
            requests=[flight.rows[row] for row in row_of.tolist()], slots=flight.slots[row_of]
        )
        alive = alive[row_of]
    return arrived if whole else arrived.kept(np.flatnonzero(alive).tolist())


def by_request(flight: InFlightStep, by_slot: Mapping[int, V], table: SlotTable) -> list[tuple[Request, V]]:
    """Values of slots, with their requests where those are still here. A slot has one row or one chunk in a
    step, and a chunk that samples is both."""
    if not by_slot:
        return []
    owners = {slot: (request, epoch) for request, slot, epoch, _ in flight.chunks}
    rows = zip(flight.slots.tolist(), flight.rows, flight.epochs.tolist(), strict=True)
    owners |= {slot: (request, epoch) for slot, request, epoch in rows}
    live = (slot for slot in by_slot if table.epoch[slot] == owners[slot][1])
    return [(owners[slot][0], by_slot[slot]) for slot in live]
