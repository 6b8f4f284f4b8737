"""Which pages hold what, who stands on them, and which go first. Page numbers only, never tensors."""

from core.cache.hold import Hold
from core.cache.manager import CacheManager, Match
from core.cache.pages import IntegrityError

__all__ = ["CacheManager", "Hold", "IntegrityError", "Match"]
