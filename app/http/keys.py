"""Typed names of the few objects that handlers share."""

from __future__ import annotations

from aiohttp import web

from app.batch import Batches
from app.http.burst import Burst
from app.service import Service
from core.config import ServeConfig

SERVICE = web.AppKey("service", Service)
BATCHES = web.AppKey("batches", Batches)
BURST = web.AppKey("burst", Burst)
SERVE = web.AppKey("serve", ServeConfig)
REQUEST_ID = web.RequestKey("request_id", str)
WARNINGS = web.RequestKey("warnings", list[str])
"""What `app.http.warning.warn` was told."""
