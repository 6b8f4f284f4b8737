"""Facts about models: sizes and switches read from a checkpoint's config, never a tensor."""

from core.models.draft import DraftSpec, algorithm_of, read_draft
from core.models.registry import check_supported, family_of, read_spec
from core.models.sentence import sentence_pooling
from core.models.spec import (
    Fp8,
    ModelSpec,
    MoeSpec,
    Norms,
    Pooling,
    PoolingSpec,
    RopeSpec,
    Task,
)

__all__ = [
    "DraftSpec",
    "Fp8",
    "ModelSpec",
    "MoeSpec",
    "Norms",
    "Pooling",
    "PoolingSpec",
    "RopeSpec",
    "Task",
    "algorithm_of",
    "check_supported",
    "family_of",
    "read_draft",
    "read_spec",
    "sentence_pooling",
]
