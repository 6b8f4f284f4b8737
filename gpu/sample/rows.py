"""The rows of a step that get a token, as kernels see them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from gpu.state.tables import SlotTables


class DraftSamples(NamedTuple):
    """Which samples of a step are of drafts. First comes one for each of the plan's rows, in its order: what
    the host knows of a row, it knows of that sample. Then come those of the drafts, row by row.

    rows    int32 [1]: rows of the plan that sample
    before  int32 [rows + 1]: drafts of all rows before each. Row r has `before[r + 1] - before[r]`, whose
            samples begin at `rows + before[r]`; a decode row's last token is the step's `r + before[r]`-th
    """

    rows: Tensor
    before: Tensor


class Rows(NamedTuple):
    """Padded samples: slots and positions (of the token to choose) int32 [rows]; how many are true (`live`),
    int32 [1] on the device; the slots' tables; and `drafts` where slots may have any."""

    slots: Tensor
    positions: Tensor
    live: Tensor
    tables: SlotTables
    drafts: DraftSamples | None = None

    def first(self, count: int) -> Rows:
        """The first `count`."""
        return self._replace(slots=self.slots[:count], positions=self.positions[:count])
