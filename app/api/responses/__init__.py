"""Responses stored on disk, so that a later request can continue them, also after a restart.

This package knows neither HTTP nor models.
"""

from app.api.responses.disk import Item, Record
from app.api.responses.store import Store

__all__ = ["Item", "Record", "Store"]
