"""Facts about models: sizes and switches read from a checkpoint's config, never a tensor."""

from core.models.draft import DraftSpec, algorithm_of, read_draft
from core.models.registry import family_of, read_spec, unsupported
from core.models.sentence import sentence_pooling
from core.models.spec import (
    ClampedGate,
    Fp8,
    Held,
    Implementation,
    Int4,
    LatentSpec,
    LinearSpec,
    ModelSpec,
    MoeSpec,
    Mxfp4,
    Norms,
    Pooling,
    PoolingSpec,
    RopeSpec,
    Task,
)

__all__ = [
    "ClampedGate",
    "DraftSpec",
    "Fp8",
    "Held",
    "Implementation",
    "Int4",
    "LatentSpec",
    "LinearSpec",
    "ModelSpec",
    "MoeSpec",
    "Mxfp4",
    "Norms",
    "Pooling",
    "PoolingSpec",
    "RopeSpec",
    "Task",
    "algorithm_of",
    "family_of",
    "read_draft",
    "read_spec",
    "sentence_pooling",
    "unsupported",
]
