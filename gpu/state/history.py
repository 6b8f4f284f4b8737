"""The recent tokens of every slot in device memory, and how its drafts by prompt lookup have fared."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

MAX_TOKENS: Final = 8192
"""Tokens of a slot that are kept. A longer text is searched in its last ones alone: 32 KiB a slot, 17 MB for
512."""

NO_TOKEN: Final = -1
"""Stands for an embedding of a prompt, which has no id. They are at the beginning of a text that ends with
tokens, so no suffix with one occurs twice, and none is ever a draft."""

# Whether a slot gets drafts follows from the share of its drafts that were accepted: a decayed average,
# which is in fixed point, so that both sets of kernels compute exactly the same.
UNIT: Final = 1024
"""An average of 1: all drafts accepted."""
START: Final = UNIT // 2
"""Of a new slot. Five steps whose drafts are all rejected bring it under `LEAST`."""
WEIGHT: Final = 4
"""A step with drafts makes up 1 / WEIGHT of the average: within a few steps it follows a text that turns from
quotation to prose."""
LEAST: Final = UNIT // 8
"""Below it the slot gets no drafts. Verifying a draft costs about a twelfth of a row's step (three cost a
quarter, from 32 rows on): drafts that are accepted less often lose time. An eighth leaves a margin."""
RETRY: Final = 64
"""Such a slot is tried again once it has had no drafts for so many steps. If half of them are accepted then,
the average is above `LEAST` at once. Seven that are rejected cost less than 1% of the time of those steps."""

AVERAGE: Final = 0
WAITED: Final = 1
EXTRA: Final = 2
"""Words of a slot behind its tokens: the average, and steps since it had drafts."""


class History(NamedTuple):
    """Per slot a ring of its last tokens, and what decides whether it is drafted for.

    words     int32 [slots, width + EXTRA]: the token at position p is at p % width (a power of two); behind
              them `AVERAGE` and `WAITED`. Cells of positions that the slot has not reached are stale.
    most      drafts of a slot
    longest   tokens at the end of a text that are looked up first, and
    shortest  the fewest
    """

    words: Tensor
    most: int
    longest: int
    shortest: int

    @property
    def width(self) -> int:
        """Tokens in each ring."""
        return self.words.shape[1] - EXTRA


def history_words(slots: int, context: int, device: torch.device) -> Tensor:
    """The words of a `History` for texts of up to `context` tokens, zero."""
    return torch.zeros(slots, _width(context) + EXTRA, dtype=torch.int32, device=device)


def history_bytes(slots: int, context: int) -> int:
    """Bytes that these take on the device."""
    return slots * (_width(context) + EXTRA) * torch.int32.itemsize


def _width(context: int) -> int:
    return 1 << (min(context, MAX_TOKENS) - 1).bit_length()
