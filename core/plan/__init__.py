"""The records that cross threads: the plan of one forward pass and its result."""

from core.plan.plan import MASKED_DRAFTS, MOST_SAVES, Chunk, NewSlot, PageWrites, Save, StepPlan
from core.plan.result import RowLogprobs, StepFailure, StepResult, Support
from core.types import PromptLogprobs

__all__ = [
    "MASKED_DRAFTS",
    "MOST_SAVES",
    "Chunk",
    "NewSlot",
    "PageWrites",
    "PromptLogprobs",
    "RowLogprobs",
    "Save",
    "StepFailure",
    "StepPlan",
    "StepResult",
    "Support",
]
