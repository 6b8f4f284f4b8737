"""The two rings through which steps come and go: memory that host and device share.

The host writes an entry into the ring and launches; the step's first kernel finds it by a counter on
the device. Its last kernel writes the tokens into the other ring; the host reads them when the step's
event says so. No copy is launched in either direction.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from core.plan import StepPlan
from core.types import Ints
from gpu.state.entry import EntryRing, EntryWriter, Limits, Surplus, layout


class Ticket(NamedTuple):
    """Where a step's answer will stand, of how many tokens; and what has to be launched beside it."""

    entry: int
    tokens: int
    marks: int
    surplus: Surplus | None


class Rings:
    """Owner: launch thread writes entries; the waiter thread reads answers whose event has passed.

    With `entries` of at least the overlap depth + 2 no entry is written while a step still reads it: a
    plan is made only when all but `depth` of those before it have been answered.
    """

    __slots__ = (
        "_answers",
        "_read",
        "_turn",
        "_words",
        "_writer",
        "_written",
        "answers",
        "cursor",
        "entries",
    )

    def __init__(self, limits: Limits, entries: int, device: torch.device) -> None:
        at = layout(limits)
        words = _shared(entries, at.words, device)
        self.answers = _shared(entries, limits.rows, device)
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self._words: Ints = words.numpy()
        self._answers: Ints = self.answers.numpy()
        self._writer = EntryWriter(limits)
        self.entries = EntryRing(words, self.cursor, at)
        self._turn = 0
        self._written = 0
        self._read = 0
        """By the waiter thread."""

    def write(self, plan: StepPlan) -> Ticket:
        """Put a plan where the next step will look."""
        self._written += 1
        entry = self._turn % len(self._words)
        written = self._writer.write(plan, self._words[entry])
        self._turn += 1
        return Ticket(entry, plan.num_samples, *written)

    def check_room(self, step: int) -> None:
        """Raise `RuntimeError` when as many steps as there are entries have not been read: `step` would write
        over an answer."""
        if self._written - self._read >= len(self._words):
            raise RuntimeError(f"step {step}: {len(self._words)} steps before it have not been read")

    def read(self, ticket: Ticket) -> Ints:
        """The tokens of a step that has ended, a copy."""
        tokens = self._answers[ticket.entry, : ticket.tokens].copy()
        self._read += 1
        return tokens

    def clear(self) -> None:
        """Empty entries, and both sides at the first entry: around warm-up, which only the device counts.

        Waits for the device: a warm-up that it has still to run would take the first true entry for its own,
        whose rows lie outside of a smaller step.
        """
        if self.cursor.is_cuda:
            torch.cuda.synchronize(self.cursor.device)
        self._words.fill(0)
        self.cursor.zero_()
        self._turn = 0


def _shared(entries: int, words: int, device: torch.device) -> Tensor:
    """int32 [entries, words], zero. Pinned memory is mapped into the address space of every CUDA device."""
    memory = torch.from_numpy(np.zeros((entries, words), np.int32))
    return memory.pin_memory() if device.type == "cuda" else memory
