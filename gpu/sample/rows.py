"""The rows of a step that get a token, as kernels see them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from gpu.state.tables import SlotTables


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
