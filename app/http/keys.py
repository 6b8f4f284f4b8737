"""Typed keys of the objects that handlers share."""

from __future__ import annotations

from collections import Counter

from aiohttp import web

from app.http.burst import Burst
from app.http.intake import Intake
from app.http.limits import Permit
from app.http.tenant import Keys
from app.http.turns import Turns
from app.service import Service
from core.config import ServeConfig

RequestCounts = Counter[tuple[str, str, int]]
"""Answers by route pattern, method and status."""

SERVICE = web.AppKey("service", Service)
BURST = web.AppKey("burst", Burst)
INTAKE = web.AppKey("intake", Intake)
TURNS = web.AppKey("turns", Turns)
REQUEST_COUNTS = web.AppKey("request_counts", RequestCounts)
SERVE = web.AppKey("serve", ServeConfig)
KEYS = web.AppKey("keys", Keys)
REQUEST_ID = web.RequestKey("request_id", str)
BEGUN = web.RequestKey("begun", bool)
"""Set where a response has begun, though its head may not be sent yet."""
PERMIT = web.RequestKey("permit", Permit)
BODY = web.RequestKey("body", bytes)
"""The raw body, kept where two handlers decode it."""
WARNINGS = web.RequestKey("warnings", list[str])
"""Warnings collected by `app.warning.warn`."""
