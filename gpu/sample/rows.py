"""The rows of a step that get a token, as kernels see them."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from core.types import NAN_TOKEN, Ints
from gpu.state.tables import SlotTables

COUNT_BITS: Final = 16
"""A row's word of an answer: its tokens in so many bits, and above them its drafts that were verified."""
COUNT_MASK: Final = (1 << COUNT_BITS) - 1


class DraftSamples(NamedTuple):
    """Which samples of a step are of drafts. First comes one for each of the plan's rows, in its order: what
    the host knows of a row, it knows of that sample. Then come those of the drafts, row by row.

    rows      int32 [1]: rows of the plan that sample
    before    int32 [rows + 1]: drafts of all rows before each. Row r has `before[r + 1] - before[r]`, whose
              samples begin at `rows + before[r]`; a decode row's last token is the step's
              `r + before[r]`-th
    proposes  int32 [1]: whether drafts are proposed behind the step
    """

    rows: Tensor
    before: Tensor
    proposes: Tensor

    def find(self, rows: Tensor, drafts: Tensor, none: int) -> Tensor:
        """The samples int64 [n] of the tokens that follow `drafts` drafts of `rows`, int64 [n] each; `none`
        where a row has fewer."""
        before = self.before[rows]
        found = torch.where(drafts > 0, self.rows + before + drafts - 1, rows)
        return found.masked_fill_(drafts > self.before[rows + 1] - before, none)


class Paths(NamedTuple):
    """Where drafts may be trees, int32 [tokens of decode rows] each but `rows`.

    rows       int32 [samples]: the step's token that each sample is behind
    ancestors  see `StepView.ancestors`
    moved      written by `SamplingKernels.accept`: how many tokens behind that of a row's j-th token the j-th
               of its accepted path lies. 0 behind the path's end
    """

    rows: Tensor
    ancestors: Tensor
    moved: Tensor


class Rows(NamedTuple):
    """Padded samples: slots and positions (of the token to choose) int32 [rows]; how many are true (`live`),
    int32 [1] on the device; the slots' tables; `drafts` where slots may have any, and `paths` where these may
    be trees."""

    slots: Tensor
    positions: Tensor
    live: Tensor
    tables: SlotTables
    drafts: DraftSamples | None = None
    paths: Paths | None = None

    def first(self, count: int) -> Rows:
        """The first `count`."""
        return self._replace(slots=self.slots[:count], positions=self.positions[:count])


class RowTokens:
    """The tokens of a step that has ended, int32 [n], row by row: `counts` int32 [rows] of each, None for one
    each. `drafted` int32 [rows]: drafts that were verified, None where no row may have any. `paths` int32
    [rows] where these are trees: bit j - 1 is 1 if draft j was accepted."""

    def __init__(
        self, tokens: Ints, counts: Ints | None = None, drafted: Ints | None = None, paths: Ints | None = None
    ) -> None:
        self.tokens, self.counts, self.drafted, self.paths = tokens, counts, drafted, paths
        self._firsts = None if counts is None else np.cumsum(counts) - counts

    def index(self, row: int, drafts: int = 0) -> int:
        """Index in `tokens` of the row's token behind `drafts` others; -1 where it has none."""
        if self._firsts is None or self.counts is None:
            return row if drafts == 0 else -1
        return int(self._firsts[row]) + drafts if drafts < self.counts[row] else -1

    def of_rows(self) -> Ints:
        """int32 [rows]: the first token of each, `NAN_TOKEN` where it has none."""
        if self._firsts is None or self.counts is None:
            return self.tokens
        first: Ints = np.append(self.tokens, np.int32(NAN_TOKEN))[self._firsts]
        first[self.counts == 0] = NAN_TOKEN
        return first
