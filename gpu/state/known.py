"""The drafts of slots on the host: the masks of a row with a grammar follow from its drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from core.types import Ints
from gpu.state.tables import SlotTables
from gpu.transfer import upload


class KnownDrafts:
    """Drafts of the slots that have grammars, as the device's next step finds them: `rows` int32 [slots, 1 +
    most], as `SlotTables.drafts`, and on a CPU the same memory.

    Owner: launch thread.
    """

    def __init__(self, tables: SlotTables) -> None:
        self._drafts = tables.drafts
        self._allowed = tables.max_drafts
        self._held = self._drafts
        if self._drafts.is_cuda:
            self._held = torch.zeros(self._drafts.shape, dtype=torch.int32, pin_memory=True)
        self.rows: Ints = self._held.numpy()

    def begin(self, slots: Sequence[int]) -> None:
        """New slots have no drafts: what the device has there is of former owners, and was not fetched for
        them. In order on the stream, behind the last step's drafter and ahead of the next one's."""
        self.rows[slots, 0] = 0
        if self._held is not self._drafts:
            self._drafts[:, 0].index_fill_(0, upload(np.array(slots, np.int64), self._drafts.device), 0)

    def end(self, slots: Sequence[int]) -> None:
        """Verify no drafts of these slots from the next step on."""
        self._allowed.index_fill_(0, upload(np.array(slots, np.int64), self._allowed.device), 0)

    def fetch(self) -> None:
        """Copy what drafters have proposed by now; there when the device has passed this point."""
        if self._held is not self._drafts:
            self._held.copy_(self._drafts, non_blocking=True)
