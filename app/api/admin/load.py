"""How busy the server is, under the names that balancers of SGLang and vLLM ask for."""

from __future__ import annotations

import time

from aiohttp import web

from app.api.request.routing import Routes
from app.http.keys import SERVICE
from app.http.reply import json_response
from core.stats import SchedulerStatistics

ROUTES = Routes()


def _scheduler(request: web.Request) -> SchedulerStatistics:
    return request.app[SERVICE].loaded.engine.statistics().scheduler


def _used(now: SchedulerStatistics) -> int:
    """Tokens of the pool that nothing else may take: neither free nor merely kept for reuse."""
    cache = now.cache
    return (cache.total - cache.free - cache.cached) * cache.page_size


@ROUTES.add("GET /load", has="server_load")
async def load(request: web.Request) -> web.StreamResponse:
    """Requests that run or wait, after vLLM."""
    now = _scheduler(request)
    return json_response({"server_load": now.running + now.waiting})


@ROUTES.add("GET /get_load", lists=True)
async def get_load(request: web.Request) -> web.StreamResponse:
    """Requests and tokens that run or wait, after older SGLang: a list with one entry per replica."""
    now = _scheduler(request)
    entry = {
        "dp_rank": 0,
        "num_reqs": now.running + now.waiting,
        "num_waiting_reqs": now.waiting,
        "num_tokens": _used(now) + now.waiting_tokens,
    }
    return json_response([entry])


@ROUTES.add("GET /v1/loads", has="timestamp dp_rank_count loads")
async def loads(request: web.Request) -> web.StreamResponse:
    """Requests and tokens, waiting and running, after SGLang."""
    now = _scheduler(request)
    size = now.cache.total * now.cache.page_size
    entry = {
        "dp_rank": 0,
        "num_running_reqs": now.running,
        "num_waiting_reqs": now.waiting,
        "num_waiting_tokens": now.waiting_tokens,
        "num_used_tokens": _used(now),
        "max_total_num_tokens": size,
        "token_usage": round(_used(now) / size, 4) if size else 0.0,
    }
    return json_response({"timestamp": time.time(), "dp_rank_count": 1, "loads": [entry]})
