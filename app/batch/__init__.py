"""Files and batches: requests on disk, run while the engine is otherwise idle.

This package knows neither HTTP nor prompts: functions from a body to an answer are passed in.
"""

from app.batch.batches import Batches
from app.batch.capacity import BackgroundCapacity
from app.batch.store import Store

__all__ = ["BackgroundCapacity", "Batches", "Store"]
