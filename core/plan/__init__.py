"""The records that cross threads: the plan of one forward pass and its result."""

from core.plan.plan import Chunk, NewSlot, PageWrites, StepPlan
from core.plan.result import PromptLogprobs, RowLogprobs, StepFailure, StepResult, Support

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
