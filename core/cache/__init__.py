"""KV pages, the radix tree over them, and eviction. Page numbers only, never tensors."""

from core.cache.hold import Hold
from core.cache.manager import CacheManager, Match
from core.cache.pages import IntegrityError

__all__ = ["CacheManager", "Hold", "IntegrityError", "Match"]
