"""`/v1/batches`."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from app.api.openai.files import BATCHES, page_limit
from app.api.request.metadata import check_metadata
from app.api.request.routing import AFTER, LISTED, Routes, limited, page
from app.batch.store import Page
from app.http.body import decoded
from app.http.tenant import tenant
from core.errors import field_error, unsupported

ROUTES = Routes()


class BatchBody(msgspec.Struct, kw_only=True):
    """`POST /v1/batches`."""

    input_file_id: str | None = None
    endpoint: str | None = None
    completion_window: str | None = None
    metadata: dict[str, str] | None = None
    output_expires_after: Any = None


@ROUTES.add(
    "POST /v1/batches", body=BatchBody, needed="input_file_id endpoint", has="id object status", errors=(404,)
)
async def create(request: web.Request) -> object:
    """Create a batch; its lines are checked when it runs, as OpenAI does."""
    body = await decoded(request, BatchBody)
    batches = request.app[BATCHES]
    if not body.input_file_id:
        raise field_error("input_file_id", "is missing")
    if body.endpoint not in batches.endpoints:
        raise field_error("endpoint", f"must be one of {', '.join(batches.endpoints)}")
    if body.output_expires_after:
        raise unsupported("output_expires_after", "delete the output file when you have it")
    check_metadata(body.metadata)
    window = body.completion_window or "24h"
    return await batches.create(tenant(), body.input_file_id, body.endpoint, window, body.metadata)


@ROUTES.add("GET /v1/batches", has=LISTED, query={"after": AFTER, "limit": limited(100)})
async def batches(request: web.Request) -> object:
    """The list, newest first."""
    limit = page_limit(request.query.get("limit"), 20, 100)
    listed = await request.app[BATCHES].list(tenant(), Page(request.query.get("after"), limit + 1))
    return page(listed, [each.id for each in listed], limit)


@ROUTES.add("GET /v1/batches/{id}", has="id object status")
async def batch(request: web.Request) -> object:
    """One batch."""
    return await request.app[BATCHES].get(tenant(), request.match_info["id"])


@ROUTES.add("POST /v1/batches/{id}/cancel", has="id object status")
async def cancel(request: web.Request) -> object:
    """Stop one; its results so far become files."""
    return await request.app[BATCHES].cancel(tenant(), request.match_info["id"])
