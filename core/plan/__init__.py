"""The records that cross threads: the plan of one forward pass and its result."""

from core.plan.plan import Chunk, NewSlot, PageWrites, StepPlan
from core.plan.result import RowLogprobs, StepFailure, StepResult, Support
from core.types import PromptLogprobs

__all__ = [
    "Chunk",
    "NewSlot",
    "PageWrites",
    "PromptLogprobs",
    "RowLogprobs",
    "StepFailure",
    "StepPlan",
    "StepResult",
    "Support",
]
