"""The recent tokens of every slot in device memory, and how many drafts by prompt lookup it accepts."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from gpu.state.served import Served

MAX_TOKENS: Final = 8192
"""Tokens of a slot that are kept. A longer text is searched in its last ones alone: 32 KiB a slot, 17 MB for
512."""

NO_TOKEN: Final = -1
"""Stands for an embedding of a prompt, which has no id. They are at the beginning of a text that ends with
tokens, so no suffix with one occurs twice, and none is ever a draft."""

# A slot gets as many drafts as are expected to be accepted, rounded up. That is a decayed average of how many
# were, in fixed point, so that both sets of kernels compute exactly the same. Where all drafts of a step were
# accepted, twice as many count: more might have been.
#
# Replayed on texts, with up to 7 drafts that each cost a twelfth of a row's step to verify (three cost a
# quarter, from 32 rows on), the speed over that without drafts is 1.19x for source code, 1.08x and 1.02x for
# prose, 3.9x for an edited copy of the prompt and 1.00x for random tokens. 7 drafts at every match had 1.13x,
# 1.04x and 0.95x, 4.0x and 0.76x.
UNIT: Final = 1024
"""One accepted draft."""
START: Final = UNIT
"""Accepted drafts that are expected of a new slot. After nine drafts that are all rejected it has less than
`LEAST`."""
WEIGHT: Final = 4
"""A step with drafts makes up 1 / WEIGHT of the average: within a few steps it follows a text that turns from
quotation to prose."""
LEAST: Final = UNIT // 10
"""A slot that expects less gets no drafts: one that is accepted less often than in every twelfth step loses
time."""
RETRY: Final = 64
"""A slot without drafts gets one again after so many steps, and more if that is accepted. If it is rejected,
it has cost a thousandth of the time of those steps; even where verifying a draft costs half a step, as with
one row of a mixture of experts, less than 1%."""

EXPECTED: Final = 0
WAITED: Final = 1
SERVED: Final = 2
SOURCE: Final = 4
FRESH: Final = 5
NAMESPACE: Final = 6
CELLS: Final = 8
EXTRA: Final = 9
"""Words of a slot behind its tokens: drafts that are expected to be accepted, in 1 / UNIT, and steps since it
had any; from `SERVED` on the same two of drafts from served text (`gpu.state.served`); where its last drafts
are from, 0 or `SERVED`. Then, of served text: whether the slot's answer has yet to begin, its namespace in
two words, and the cells of its ring up to the newest token. A new request leaves that one as it is."""


class History(NamedTuple):
    """Per slot a ring of its last tokens, and what decides how many drafts it gets.

    words     int32 [slots, width + EXTRA]: the token at position p is at p % width (a power of two); behind
              them `EXPECTED` and so on. Cells of positions that the slot has not reached are stale.
    most      drafts of a slot
    longest   tokens at the end of a text that are looked up first, and
    shortest  the fewest
    served    texts of others, if these are looked up too
    """

    words: Tensor
    most: int
    longest: int
    shortest: int
    served: Served | None = None

    @property
    def width(self) -> int:
        """Tokens in each ring."""
        return self.words.shape[1] - EXTRA


def history_words(slots: int, context: int, device: torch.device) -> Tensor:
    """The words of a `History` for texts of up to `context` tokens, zero."""
    return torch.zeros(slots, _width(context) + EXTRA, dtype=torch.int32, device=device)


def history_bytes(slots: int, context: int) -> int:
    """Bytes that histories take on the device."""
    return slots * (_width(context) + EXTRA) * torch.int32.itemsize


def _width(context: int) -> int:
    return 1 << (min(context, MAX_TOKENS) - 1).bit_length()
