"""Files and batches: lines of requests kept on disk and run on capacity that nobody else wants.

This package knows neither HTTP nor prompts: how a body becomes an answer is handed in.
"""

from app.batch.batches import Batches
from app.batch.capacity import BackgroundCapacity
from app.batch.store import Store

__all__ = ["BackgroundCapacity", "Batches", "Store"]
