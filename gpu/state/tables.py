"""Every per-slot quantity that a step needs, in memory of the device. A column is declared once, here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from core.plan import NewSlot
from core.types import NO_LIMIT

_ALIGNED: Final = 4
"""Words: every column starts at a multiple of 16 bytes, so that an int64 column may be viewed as one."""

ONE: Final = 0x3F800000
"""Bits of the float32 1: those of positive numbers ascend as the numbers do."""
LEVEL_BITS: Final = 20
"""Low bits of a float32 that a level leaves out: eight values are left to an octave."""
LEVELS: Final = 64
"""Levels of probability that are told apart: those of eight octaves below 1; the last one also stands for all
that is less."""


class Column:
    """One value per slot: int32, float32, or int64 in two words.

    `begin` gives what a new slot starts with; its words travel in the slot's record of the ring entry.
    `neutral` stands in slot 0, the dump of padded rows. `device`: kernels write it from then on; the host
    alone writes the others.
    """

    def __init__(
        self, dtype: torch.dtype, begin: Callable[[NewSlot], float], neutral: float = 0, device: bool = False
    ) -> None:
        self.dtype, self.begin, self.neutral, self.device = dtype, begin, neutral, device
        self.width = dtype.itemsize // 4
        self.name, self.row = "", 0

    def __set_name__(self, owner: type[SlotTables], name: str) -> None:
        self.name = name

    def __get__(self, tables: SlotTables, owner: type[SlotTables]) -> Tensor:
        return tables.columns[self.row]


_INT, _LONG, _FLOAT = torch.int32, torch.int64, torch.float32


class SlotTables:
    """One entry per slot in each column; slot 0 is the dump of padded rows and stays neutral.

    words        int32 [WORDS, slots, padded]: the rows of a column hold its words, slot by slot
    page_table   int32 [slots, pages]; entries past a slot's pages are stale
    drafts       int32 [slots, 1 + most]: how many tokens may follow the slot's last one, and those
    survival     float32 [slots, most]: of each of these the probability that it and all before it are
                 accepted, by which a step's drafts are divided among its rows; 1 where its drafter cannot say
    ancestors    int32 [slots, most] where drafts may be trees, else None: which drafts lie on the path from
                 the slot's last token to each. Bit k: the draft k before it, bit 0 itself; 1 from the last
                 token on. So -1 is every draft before it, a chain. A parent comes before its children

    Written by the kernels of the step alone: what the host has to say travels in the step's entry.
    """

    seed = Column(_LONG, lambda new: new.params.seed)
    # The future-token cell: a step's last kernel writes it, as the length, and the next step reads both.
    last_token = Column(_INT, lambda new: 0, device=True)
    # Tokens before the last one: their KV is written. For a prompt under way its chunks say so.
    length = Column(_INT, lambda new: new.cached, device=True)
    # The most of its drafts that are verified in a step.
    max_drafts = Column(_INT, lambda new: NO_LIMIT if new.drafts else 0)
    # The first position that is not written.
    limit = Column(_INT, lambda new: new.limit, neutral=NO_LIMIT)
    # The place of its adapter's weights, -1 for none.
    place = Column(_INT, lambda new: new.place, neutral=-1)
    # 0 is greedy.
    temperature = Column(_FLOAT, lambda new: 0.0 if new.params.greedy else new.params.temperature)
    top_k = Column(_INT, lambda new: new.params.top_k)
    top_p = Column(_FLOAT, lambda new: new.params.top_p, neutral=1.0)
    min_p = Column(_FLOAT, lambda new: new.params.min_p)
    # Row of token counts, -1 for none.
    count_row = Column(_INT, lambda new: new.count_row, neutral=-1)
    repetition = Column(_FLOAT, lambda new: new.params.repetition_penalty, neutral=1.0)
    frequency = Column(_FLOAT, lambda new: new.params.frequency_penalty)
    presence = Column(_FLOAT, lambda new: new.params.presence_penalty)
    # Entries of the slot's rows in `gpu.sample.token_tables`: biased ids, and stop ids that min_tokens holds
    # back up to a position.
    num_bias = Column(_INT, lambda new: len(new.params.biases))
    num_stops = Column(_INT, lambda new: len(new.params.held_stops))
    stop_from = Column(_INT, lambda new: min(len(new.prompt) + new.params.min_tokens, NO_LIMIT))

    def __init__(
        self, max_rows: int, max_pages: int, device: torch.device, most_drafts: int = 0, trees: bool = False
    ) -> None:
        self.slots = max_rows + 1
        padded = -(-self.slots // _ALIGNED) * _ALIGNED
        self.words = torch.zeros(WORDS, padded, dtype=torch.int32, device=device)
        self.page_table = torch.zeros(self.slots, max_pages, dtype=torch.int32, device=device)
        self.most_drafts = most_drafts
        self.drafts = torch.zeros(self.slots, 1 + most_drafts, dtype=torch.int32, device=device)
        self.survival = torch.ones(self.slots, most_drafts, device=device)
        self.ancestors: Tensor | None = None
        if trees:
            self.ancestors = torch.full_like(self.drafts[:, 1:], -1)
        self.columns: dict[int, Tensor] = {}
        for column in COLUMNS:
            words = self.words[column.row : column.row + column.width].view(-1)
            self.columns[column.row] = words.view(column.dtype)[: self.slots].fill_(column.neutral)


def _laid_out() -> tuple[Column, ...]:
    """Columns of two words first: their rows are then 2 c and 2 c + 1, which kernels reckon with."""
    found = [each for each in vars(SlotTables).values() if isinstance(each, Column)]
    found.sort(key=lambda column: -column.width)
    row = 0
    for column in found:
        column.row = row
        row += column.width
    return tuple(found)


COLUMNS: Final = _laid_out()
WORDS: Final = sum(column.width for column in COLUMNS)
WIDE: Final = sum(column.width for column in COLUMNS if column.width == 2)
"""Words of the columns of two words."""


def row_of(name: str) -> int:
    """First row of a column in `SlotTables.words`; in a record of a new slot its words begin one later."""
    return next(column.row for column in COLUMNS if column.name == name)
