"""Routes for operators: health, statistics, load, prefix cache, aborts."""

from __future__ import annotations

import asyncio
import secrets
import time

import msgspec
import numpy as np
from aiohttp import web

from app.api.request.routing import Routes
from app.api.request.sampling import MAX_CHOICES, accepting, check_count, current, job_id
from app.api.request.schema import AbortBody, AbortManyBody
from app.engine.job import Job
from app.http.delivery import Collector, running
from app.http.errors import fault
from app.http.keys import KEYS, REQUEST_COUNTS, SERVICE
from app.http.prometheus import CONTENT_TYPE, exposition
from app.http.reply import json_response
from app.http.tenant import tenant
from app.process import VERSION
from app.service import Loaded, Phase
from core.errors import NotFound, RequestError, Unavailable, field_error
from core.request import SamplingParams
from core.stats import SchedulerStatistics

ROUTES = Routes()

HEALTH_SECONDS = 20.0
"""Timeout of the one token of `/health_generate`. SGLang's figure."""


@ROUTES.add("GET /health", "HEAD /health", "GET /ping", has="status")
async def health(request: web.Request) -> object:
    """The state of the server. It does not ask the engine, so that it answers at any load."""
    state = request.app[SERVICE].health
    if state.phase is Phase.READY:
        return {"status": "ok"}
    described = {
        "status": state.phase.value,
        "stage": state.stage,
        "progress": round(state.progress, 3),
        "seconds_left": None if state.seconds_left is None else round(state.seconds_left, 1),
        "reason": state.reason,
    }
    response = json_response(described, 503)
    response.headers.update(fault(Unavailable("")).headers)
    return response


@ROUTES.add("GET /health_generate", has="status", errors=(429,))
async def health_generate(request: web.Request) -> object:
    """Run one token through the whole engine."""
    loaded = accepting(request.app[SERVICE])
    job = Job(
        id=f"health-{secrets.token_hex(8)}",
        prompt=np.zeros(1, np.int32),
        sampling=SamplingParams(temperature=0.0),
        max_tokens=1 if loaded.card.task == "generate" else 0,
        ignore_eos=True,
    )
    collector = Collector(1)
    try:
        async with asyncio.timeout(HEALTH_SECONDS):
            async with running(loaded.engine, [job], collector.take):
                await collector.collect()
    except TimeoutError:
        raise Unavailable(f"One token took more than {HEALTH_SECONDS:g} s.") from None
    return {"status": "ok"}


@ROUTES.add("GET /server_info", "GET /get_server_info", has="version status model_card internal_states")
async def server_info(request: web.Request) -> object:
    """Settings and statistics. SGLang's bench reads `internal_states`, of them `avg_spec_accept_length`, and
    `max_total_num_tokens`, the size of the KV pool."""
    service = request.app[SERVICE]
    replicas = service.loaded.engine.statistics()
    pools = [each.scheduler.cache for each in replicas]
    states = msgspec.to_builtins(replicas)
    for state, each in zip(states, replicas, strict=True):
        if each.drafts is not None:
            state["avg_spec_accept_length"] = each.drafts.length
    card = msgspec.to_builtins(service.loaded.card)
    del card["path"]
    return {
        **service.settings,
        "version": VERSION,
        "status": service.health.phase.value,
        "started_at": service.started_at,
        "model_card": card,
        "max_total_num_tokens": sum(pool.total * pool.page_size for pool in pools),
        "internal_states": states,
    }


@ROUTES.add("GET /metrics", media=CONTENT_TYPE.partition(";")[0])
async def metrics(request: web.Request) -> web.StreamResponse:
    """Metrics in Prometheus' format, also during startup."""
    app = request.app
    text = await exposition(app[SERVICE], app[REQUEST_COUNTS], app[KEYS].accounts, VERSION)
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})


def _loads(request: web.Request) -> list[SchedulerStatistics]:
    """Scheduler statistics of each replica."""
    return [each.scheduler for each in request.app[SERVICE].loaded.engine.statistics()]


@ROUTES.add("GET /load", has="server_load")
async def load(request: web.Request) -> object:
    """Requests that run or wait, after vLLM."""
    return {"server_load": sum(now.running + now.waiting for now in _loads(request))}


@ROUTES.add("GET /get_load", lists=True)
async def get_load(request: web.Request) -> object:
    """Requests and tokens that run or wait, after older SGLang: a list with one entry per replica."""
    return [
        {
            "dp_rank": replica,
            "num_reqs": now.running + now.waiting,
            "num_waiting_reqs": now.waiting,
            "num_tokens": now.used_tokens + now.waiting_tokens,
        }
        for replica, now in enumerate(_loads(request))
    ]


@ROUTES.add("GET /v1/loads", has="timestamp dp_rank_count loads")
async def loads(request: web.Request) -> object:
    """Requests and tokens, waiting and running, after SGLang."""
    entries = []
    for replica, now in enumerate(_loads(request)):
        size = now.cache.total * now.cache.page_size
        entry = {
            "dp_rank": replica,
            "num_running_reqs": now.running,
            "num_waiting_reqs": now.waiting,
            "num_waiting_tokens": now.waiting_tokens,
            "num_used_tokens": now.used_tokens,
            "max_total_num_tokens": size,
            "token_usage": round(now.used_tokens / size, 4) if size else 0.0,
        }
        entries.append(entry)
    return {"timestamp": time.time(), "dp_rank_count": len(entries), "loads": entries}


@ROUTES.add("GET /version", has="version")
async def show_version(request: web.Request) -> object:
    """The version of the server."""
    return {"version": VERSION}


@ROUTES.add(
    "GET /flush_cache", "POST /flush_cache", "POST /reset_prefix_cache", has="success message", admin=True
)
async def flush_cache(request: web.Request) -> object:
    """Empty the prefix cache, unless requests run."""
    if not request.app[SERVICE].loaded.engine.flush():
        raise RequestError("The cache is in use: requests are running or waiting.", code="cache_in_use")
    return {"success": True, "message": "Cache flushed."}


@ROUTES.add("GET /debug/requests/{id}", has="id")
async def timeline(request: web.Request) -> object:
    """Timings of a recent request."""
    id = request.match_info["id"]
    found = request.app[SERVICE].loaded.engine.timeline(id, tenant())
    if found is None:
        raise NotFound(f"No recent request has the id '{id[:200]}'.", "id", "request_not_found")
    return found


@ROUTES.post(
    AbortBody, "/abort_request", example="abort_all", has="success aborted", errors=(404,), model=current
)
async def abort_request(request: web.Request, body: AbortBody, loaded: Loaded) -> object:
    """Abort one request by id, or all of them."""
    engine = loaded.engine
    if body.abort_all:
        return {"success": True, "aborted": engine.abort_all(tenant=tenant())}
    if not body.rid:
        raise RequestError("Give 'rid', or 'abort_all': true.", "rid")
    aborted = engine.abort([job_id(body.rid, "")], tenant())
    if not aborted:
        raise NotFound(f"There is no request with the id '{body.rid[:200]}'.", "rid", "request_not_found")
    return {"success": True, "aborted": aborted}


@ROUTES.post(AbortManyBody, "/abort_requests", needed="request_ids", has="success aborted", model=current)
async def abort_requests(request: web.Request, body: AbortManyBody, loaded: Loaded) -> object:
    """Abort requests by their ids, after vLLM; unknown ids are ignored."""
    ids = body.request_ids
    if ids is None:
        raise field_error("request_ids", "is missing")
    check_count(len(ids), MAX_CHOICES, "ids", "request_ids")
    aborted = loaded.engine.abort([job_id(id, "", "request_ids") for id in ids], tenant())
    return {"success": True, "aborted": aborted}
