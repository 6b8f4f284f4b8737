"""The two rings through which steps come and go: memory that host and devices share.

The host writes an entry and every rank launches; a step's first kernel finds the entry by a counter on its
device. Its last kernel writes the tokens into the rank's other ring; the host reads them when the step's
event says so. No copy is launched in either direction.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from core.plan import StepPlan
from core.types import Ints
from gpu.sample.rows import COUNT_BITS, COUNT_MASK, RowTokens
from gpu.state.entry import EntryRing, EntryWriter, Limits, Surplus, layout


class Ticket(NamedTuple):
    """Where a step's answer will stand, of how many rows, whether these may have drafts, and what has to be
    launched beside it."""

    entry: int
    rows: int
    drafts: bool
    marks: int
    surplus: Surplus | None


class Entries:
    """Plans as entries: the first rank that comes to a plan writes it, for all.

    With `count` of at least the overlap depth + 2 no entry is written while a step still reads it: a plan is
    made only when every rank has answered all but `depth` of those before it.
    """

    __slots__ = ("_lock", "_tickets", "_words", "_writer", "_written", "at", "limits", "read", "words")

    def __init__(self, limits: Limits, count: int, device: torch.device) -> None:
        self.limits, self.at = limits, layout(limits)
        self.words = _shared(count, self.at.words, device)
        self.read: list[int] = []
        """How many answers have been read, by rank."""
        self._words: Ints = self.words.numpy()
        self._writer = EntryWriter(limits)
        self._lock = threading.Lock()
        self._tickets: dict[int, Ticket] = {}
        self._written = 0

    def write(self, turn: int, plan: StepPlan) -> Ticket:
        """The ticket of `plan`, which is each rank's `turn`-th."""
        entry = turn % len(self._words)
        with self._lock:
            if turn == self._written:
                written = self._writer.write(plan, self._words[entry])
                rows = plan.num_samples - plan.drafts
                self._tickets[entry] = Ticket(entry, rows, plan.drafts > 0, *written)
                self._written += 1
            return self._tickets[entry]


class Rings:
    """A rank's side of the entries, and its answers.

    entries  as the rank's steps read them
    empty    the same of nothing: what warms up reads it, and counts in it

    Owner: the launch thread takes tickets; the waiter thread reads answers whose event has passed.
    """

    def __init__(self, entries: Entries, device: torch.device) -> None:
        words = entries.words
        self._shared, self._rank = entries, len(entries.read)
        entries.read.append(0)
        limits = entries.limits
        self._counted = limits.samples if limits.drafts else 0
        """Where counts begin in an answer, 0 where every row has one token."""
        counted = limits.rows * ((limits.drafts > 0) + limits.trees)
        self._paths = limits.samples + limits.rows if limits.trees else 0
        """Where paths begin, 0 where drafts are no trees."""
        self.answers = _shared(len(words), limits.samples + counted, device)
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self.entries = EntryRing(words, self.cursor, entries.at)
        self.empty = EntryRing(
            torch.zeros_like(words, device=device), torch.zeros_like(self.cursor), entries.at
        )
        self._answers: Ints = self.answers.numpy()
        self._turn = 0

    def write(self, plan: StepPlan) -> Ticket:
        """Put a plan where the next step will look, if no other rank has."""
        ticket = self._shared.write(self._turn, plan)
        self._turn += 1
        return ticket

    def check_room(self, step: int) -> None:
        """Raise `RuntimeError` when a rank has not read as many steps as there are entries: `step` would
        write over one."""
        count = len(self._answers)
        if self._turn - min(self._shared.read) >= count:
            raise RuntimeError(f"step {step}: {count} steps before it have not been read")

    def read(self, ticket: Ticket) -> RowTokens:
        """A copy of the answer of a step that has ended. Without drafts in the plan, and with a token for
        each row, there are no counts: reading and adding them up would take the host 0.05 ms a step or more,
        which a small model's step of 0.5 ms does not hide."""
        answer, counts, drafted, paths, made = self._answers[ticket.entry], None, None, None, ticket.rows
        if self._counted:
            words = answer[self._counted : self._counted + ticket.rows]
            counts = words & COUNT_MASK
            made = int(counts.sum())
            if ticket.drafts:
                drafted = words >> COUNT_BITS
                if self._paths:
                    paths = answer[self._paths : self._paths + ticket.rows].copy()
            elif made == ticket.rows:  # none of them is at its limit
                counts = None
        tokens = answer[:made].copy()
        self._shared.read[self._rank] += 1
        return RowTokens(tokens, counts, drafted, paths)


def _shared(entries: int, words: int, device: torch.device) -> Tensor:
    """int32 [entries, words], zero. Pinned memory is mapped into the address space of every CUDA device."""
    memory = torch.from_numpy(np.zeros((entries, words), np.int32))
    return memory.pin_memory() if device.type == "cuda" else memory
