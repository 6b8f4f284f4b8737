"""JSON responses."""

from __future__ import annotations

import msgspec
from aiohttp import web

from app.errors import Fault


def json_response(value: object, status: int = 200) -> web.Response:
    """`value` as JSON; NaN and infinities become null."""
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def error_response(fault: Fault, anthropic: str | None = None) -> web.Response:
    """An error in the nested shape, or in Anthropic's for the request with that id, with the headers
    that tell clients whether to try again."""
    body = fault.body() if anthropic is None else fault.anthropic_body(anthropic)
    response = web.Response(body=body, status=fault.status, content_type="application/json")
    response.headers.update(fault.headers)
    return response
