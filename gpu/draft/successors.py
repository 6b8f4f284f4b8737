"""The tokens behind chunks that end inside a prompt, which a step does not have and its drafter may need."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from core.plan import StepPlan
from core.types import Ints
from gpu.state.view import StepView
from gpu.transfer import upload


class Successors:
    """Owner: launch thread."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._texts: dict[int, Ints] = {}
        """Prompt and known output by slot."""
        self._tokens = torch.full((slots,), -1, dtype=torch.int32, device=device)
        """The token behind each chunk of the step; -1 where the step chooses it, or there is no chunk."""
        self._any = False

    def prepare(self, plan: StepPlan) -> None:
        """Learn what stands behind the chunks of `plan`, ahead of its step."""
        for new in plan.new_slots:
            self._texts[new.slot] = np.concatenate([new.prompt, new.output])
        if not self._any and all(chunk.samples for chunk in plan.chunks):
            return
        found = np.full(len(self._tokens), -1, np.int32)
        for at, chunk in enumerate(plan.chunks):
            text, end = self._texts[chunk.slot], chunk.start + len(chunk.tokens)
            if not chunk.samples and end < len(text):  # the end of a prompt without output
                found[at] = text[end]
        self._tokens.copy_(upload(found, self._tokens.device))
        self._any = bool((found >= 0).any())

    def behind(self, view: StepView) -> Tensor:
        """int32 [chunks]: the token behind each chunk of `view`, -1 where there is none to tell."""
        return self._tokens[: view.max_chunks]
