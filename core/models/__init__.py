"""Facts about models: sizes and switches read from a checkpoint's config, never a tensor."""

from core.models.registry import FAMILIES, Family, family_of, read_spec
from core.models.spec import ModelSpec, MoeSpec, RopeSpec

__all__ = ["FAMILIES", "Family", "ModelSpec", "MoeSpec", "RopeSpec", "family_of", "read_spec"]
