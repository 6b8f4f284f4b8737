"""Acceptance of a chosen length, at the full cost of drafting and verifying.

Random weights reject nearly every draft. Before the real acceptance of a step, the drafts that it compares
are therefore overwritten on the device: the first A - 1 with the tokens that were sampled, the others with
different ones. Everything else runs as it is. One kernel of about two microseconds is added to each step.

A request asks for its acceptance with its seed (`seed_for`); others keep their own drafts. Of a fractional
A - 1 the next whole number is taken at some positions, by a hash, so that the mean over positions is right.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from gpu.sample.penalties import Counts
from gpu.sample.rows import Rows

MARK = 0x5BEC
"""Bits from 48 on of seeds that ask for an acceptance."""
FOREVER = (1 << 32) - 1
UNIT = 16
"""Accepted drafts are counted in parts of this size."""


def seed_for(length: float, then: float | None = None, switch: int = FOREVER) -> int:
    """The seed of a request whose steps accept `length` tokens each (the last one is not a draft), and from
    position `switch` of its text on `then`. ValueError for a length outside of 1 to 16."""
    first, second = (round((each - 1) * UNIT) for each in (length, length if then is None else then))
    if not (0 <= first < 256 and 0 <= second < 256 and 0 <= switch <= FOREVER):
        raise ValueError(f"accepted lengths of {length} and {then} from {switch} on")
    return MARK << 48 | switch << 16 | second << 8 | first


class Force(Protocol):
    """Overwrites the drafts that the step compares. `pdl` is programmatic dependent launch."""

    def __call__(self, tokens: Tensor, rows: Rows, *, pdl: bool = False) -> None: ...


def force(tokens: Tensor, rows: Rows, *, pdl: bool = False) -> None:
    """See `Force`: for a CPU."""
    assert rows.drafts is not None
    tables, own, before = rows.tables, int(rows.drafts.rows), rows.drafts.before.numpy()
    made, drafts = tokens.numpy(), tables.drafts.numpy()
    for row, (slot, position) in enumerate(
        zip(rows.slots[:own].tolist(), rows.positions[:own].tolist(), strict=True)
    ):
        seed, given = int(tables.seed[slot]), int(before[row + 1] - before[row])
        if seed >> 48 != MARK or not given:
            continue
        behind = own + int(before[row])
        sampled = np.append(made[row], made[behind : behind + given - 1]).astype(np.int32)
        level = seed & 255 if position < seed >> 16 & FOREVER else seed >> 8 & 255
        right = level + _part(slot, position) >> 4
        drafts[slot, 1 : 1 + given] = np.where(np.arange(given) < right, sampled, sampled ^ 1)


def _part(slot: int, position: int) -> int:
    """0 to 15, as good as random."""
    word = (slot * 0x9E3779B1 ^ position * 0x85EBCA6B) & 0xFFFFFFFF
    word = (word ^ word >> 15) * 0x2C1B3C6D & 0xFFFFFFFF
    return word >> 28


def install(kernels: ModuleType, force: Force) -> None:
    """Let a set of sampling kernels force drafts before it accepts them."""
    accept = kernels.accept

    def forced(
        tokens: Tensor, rows: Rows, cursor: Tensor, out: Tensor, counts: Counts | None = None, **how: Any
    ) -> None:
        if rows.tables.most_drafts and rows.drafts is not None:
            force(tokens, rows, **how)
        accept(tokens, rows, cursor, out, counts, **how)

    vars(kernels)["accept"] = forced
