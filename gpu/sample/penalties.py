"""Repetition, frequency and presence penalties, and the counts they need."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gpu.device import zeros
from gpu.sample.select import where


class Penalty(NamedTuple):
    """One row's penalties; 1, 0 and 0 are off."""

    repetition: float
    frequency: float
    presence: float


class Counts:
    """Owner: launch thread. A row of counts per slot, used where the slot is penalised.

    5 bytes per vocabulary entry and row: how often a token was generated, and whether it occurs in
    prompt or output at all. `NewSlot.count_row` names a slot's row; rows are not cleared when given
    back but when handed out.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._generated = zeros((num_rows, vocab_size), torch.int32, device)
        self._seen = zeros((num_rows, vocab_size), torch.bool, device)

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """How often generated int32 [rows, vocab], and whether seen at all bool [rows, vocab]."""
        return self._generated, self._seen

    def clear(self, row: int) -> None:
        """Forget what a row's former owner had."""
        self._generated[row].zero_()
        self._seen[row].zero_()

    def mark(self, marks: Tensor) -> None:
        """Note what slots have so far: `marks` int32 [n, 2] of count row and token, or ~token where it was
        generated."""
        rows, words = marks.long().unbind(1)
        made = words < 0
        tokens = torch.where(made, ~words, words)
        self._seen[rows, tokens] = True
        self._generated.index_put_((rows, tokens), made.int(), accumulate=True)

    def penalise(self, logits: Tensor, row: int, penalty: Penalty, drafts: Tensor | None = None) -> None:
        """Change `logits` float32 [vocab] in place, for the tokens seen so far and `drafts` int32 [n], as if
        these were generated.

        Repetition first: a positive logit is divided, a negative one multiplied. Then
        `frequency` times the number of times generated and `presence` once if generated are
        subtracted; the prompt does not count for these two.
        """
        seen = self._seen[row]
        if drafts is not None:
            seen = seen.index_fill(0, drafts.long(), True)
        ids = where(seen)
        x = logits.index_select(0, ids)
        if penalty.repetition != 1.0:
            x = torch.where(x > 0, x / penalty.repetition, x * penalty.repetition)
        if penalty.frequency != 0.0 or penalty.presence != 0.0:
            times = self._generated[row].index_select(0, ids)
            if drafts is not None:
                times += (ids.unsqueeze(1) == drafts).sum(1)
            x -= penalty.frequency * times + penalty.presence * (times > 0)
        logits.index_copy_(0, ids, x)

    def add(self, rows: Tensor, tokens: Tensor) -> None:
        """Count `tokens` int64 [n] for count rows `rows` int64 [n]; a token of -1 is not counted."""
        valid = tokens >= 0
        rows, tokens = rows[valid], tokens[valid]
        self._generated.index_put_(
            (rows, tokens), torch.ones_like(tokens, dtype=torch.int32), accumulate=True
        )
        self._seen[rows, tokens] = True
