"""The rows of a step that get a token, as kernels see them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from gpu.state.tables import SlotTables


class Queries(NamedTuple):
    """Which samples are one row's: those from `firsts[row]` to before `firsts[row + 1]`, its last token's and
    its drafts'. `firsts` int32 [rows + 1], of `live` int32 [1] true rows; `ids` int32 [tokens] are the step's
    tokens, which samples of decode rows stand in the order of."""

    firsts: Tensor
    live: Tensor
    ids: Tensor


class Rows(NamedTuple):
    """Padded rows: slots and positions (of the token to choose) int32 [rows]; how many are true (`live`),
    int32 [1] on the device; and the slots' tables."""

    slots: Tensor
    positions: Tensor
    live: Tensor
    tables: SlotTables

    def first(self, count: int) -> Rows:
        """The first `count`."""
        return self._replace(slots=self.slots[:count], positions=self.positions[:count])
