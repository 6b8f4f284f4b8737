"""Around every handler: request id, CORS, API key, errors, one log line."""

from __future__ import annotations

import logging
import re

import msgspec
from aiohttp import hdrs, web
from aiohttp.http import HttpVersion11
from aiohttp.typedefs import Handler

from app.http.access import CLIENT_GONE, current_usage, entry, measured
from app.http.errors import AnthropicError, CohereError, Error, ErrorShape, HttpError, OllamaError, fault
from app.http.keys import KEYS, PERMIT, REQUEST_COUNTS, REQUEST_ID, TURNS, WARNINGS
from app.http.limits import NOBODY, Permit
from app.http.reply import SERVER, error_response
from app.http.report import usage_of
from app.http.tenant import acting
from app.ids import random_hex
from app.logs import FIELDS
from app.warning import HEADER, header_value, warnings
from core.clock import monotonic
from core.errors import LoomError

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/", "/health", "/metrics"})
"""The only routes without authentication, for probes, scrapers, browsers and clients that look for a server.
For any other path the key is checked before routing, so that no new route is open by accident."""

OPEN_FOLDER = "/page/"
"""Files of the page at `/`: they are open too, since the page asks for the key itself."""

QUIET_PATHS = OPEN_PATHS
"""Paths that probes poll several times a second: logged at debug level."""

ANTHROPIC_PATH = "/v1/messages"
"""Errors at and below this path have Anthropic's shape."""

OLLAMA_PATH = "/api/"
"""Errors below this path have Ollama's shape."""

COHERE_PATHS = ("/v2/chat", "/cohere")
"""Errors at and below these have Cohere's shape."""

_ID = re.compile(r"[\x21-\x7e]{1,128}")
_HEADER_NAMES = re.compile(r"[A-Za-z0-9\-_, ]{1,2000}")

ALLOWED_HEADERS = (
    "Authorization, Content-Type, X-Api-Key, X-Request-Id, X-Correlation-Id, OpenAI-Organization, "
    "OpenAI-Project, X-Stainless-Arch, X-Stainless-Async, X-Stainless-Helper-Method, X-Stainless-Lang, "
    "X-Stainless-OS, X-Stainless-Package-Version, X-Stainless-Poll-Helper, X-Stainless-Read-Timeout, "
    "X-Stainless-Retry-Count, X-Stainless-Runtime, X-Stainless-Runtime-Version, X-Stainless-Timeout, "
    "Anthropic-Version, Anthropic-Beta, Anthropic-Dangerous-Direct-Browser-Access, X-Data-Parallel-Rank, "
    "X-Session-Id, X-Llm-D-Inference-Objective, X-Llm-D-Slo-Ttft-Ms, X-Llm-D-Slo-Tpot-Ms, "
    "X-Prefiller-Host-Port"
)
EXPOSED_HEADERS = (
    f"X-Request-Id, Request-Id, Retry-After, Retry-After-Ms, X-Should-Retry, {HEADER}, "
    "X-RateLimit-Limit-Requests, X-RateLimit-Remaining-Requests, X-RateLimit-Reset-Requests, "
    "X-RateLimit-Limit-Tokens, X-RateLimit-Remaining-Tokens, X-RateLimit-Reset-Tokens"
)


def log_requests(on: bool) -> None:
    """Log a line for every request from now on, or none."""
    log.setLevel(logging.NOTSET if on else logging.WARNING)


def sent_key(request: web.Request) -> str:
    """The key from either header, or empty."""
    scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
    return bearer.strip() if scheme.lower() == "bearer" else request.headers.get("X-Api-Key", "")


def is_open(path: str) -> bool:
    """Whether a path needs no key."""
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


def _permit(request: web.Request) -> Permit:
    """A permit for the account of a request. Raises `HttpError` 401 for a wrong key."""
    found = request.app[KEYS].find(sent_key(request))
    if found is None and is_open(request.path):
        found = NOBODY.account
    if found is None:
        raise HttpError(
            401,
            "Incorrect API key provided. Send it as 'Authorization: Bearer KEY'.",
            "invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return Permit(found)


@web.middleware
async def edge(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The only middleware: turns everything but a disconnect into an answer."""
    started, usage = monotonic(), usage_of(request)
    request[REQUEST_ID] = _request_id(request)
    status = CLIENT_GONE
    try:
        with warnings() as request[WARNINGS], measured(usage):
            response = await _answer(request, handler)
        status = response.status
        return response
    finally:
        _count(request, status)
        usage.end(status)
        level = logging.DEBUG if request.path in QUIET_PATHS else logging.INFO
        if log.isEnabledFor(level):
            line = entry(request, status, usage, started, monotonic())
            log.log(level, "%s", line, extra={FIELDS: msgspec.to_builtins(line)})


def _count(request: web.Request, status: int) -> None:
    """Count an answer. What has no route or an unknown method is one label value, whatever was sent: each
    further value would be a series for ever, at the will of any client."""
    resource = request.match_info.route.resource
    handler = "none" if resource is None else resource.canonical
    method = request.method if request.method in hdrs.METH_ALL else "other"
    request.app[REQUEST_COUNTS][handler, method, status] += 1


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        if request.method == "OPTIONS":
            return _preflight(request)
        if request.body_exists:  # probes and scrapers do not wait behind a burst of prompts
            await request.app[TURNS].enter()
        with acting(_permit(request)) as request[PERMIT]:
            return await handler(request)
    except LoomError as error:
        return _error(request, error)
    except web.HTTPException as error:
        return _error(request, _translate(request, error))
    except ConnectionError:
        raise  # the client has disconnected: aiohttp closes the connection
    except Exception:
        log.exception("request %s failed", request[REQUEST_ID])
        return _error(request, RuntimeError())
    finally:
        if PERMIT in request:
            request[PERMIT].release()


def _error(request: web.Request, error: Exception) -> web.Response:
    answer = fault(error)
    if (usage := current_usage()) is not None:
        usage.fail(answer)
    return error_response(answer, answer.body(error_class(request.path), request[REQUEST_ID]))


def error_class(path: str) -> ErrorShape:
    """The shape of errors on a path."""
    if under(path, ANTHROPIC_PATH):
        return AnthropicError
    if under(path, *COHERE_PATHS):
        return CohereError
    return OllamaError if path.startswith(OLLAMA_PATH) else Error


def under(path: str, *tops: str) -> bool:
    """`path` is one of these or below one."""
    return any(path == top or path.startswith(top + "/") for top in tops)


def _translate(request: web.Request, error: web.HTTPException) -> HttpError:
    """aiohttp's own errors, which have HTML or plain text, in our shape."""
    where = f"{request.method} {request.path[:200]}"
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{where} is not allowed; this path takes {allowed}."
        return HttpError(405, message, "method_not_allowed", headers={"Allow": allowed})
    if error.status == 404:
        return HttpError(404, f"No route for {where}.", "unknown_url")
    return HttpError(error.status, error.reason)


def _preflight(request: web.Request) -> web.Response:
    requested = request.headers.get("Access-Control-Request-Headers", "")
    return web.Response(
        status=204,
        headers={
            "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
            "Access-Control-Allow-Headers": requested
            if _HEADER_NAMES.fullmatch(requested)
            else ALLOWED_HEADERS,
            "Access-Control-Max-Age": "86400",
        },
    )


async def decorate(request: web.Request, response: web.StreamResponse) -> None:
    """on_response_prepare: headers of every response, including streams and errors."""
    headers = response.headers
    id = request.get(REQUEST_ID) or _request_id(request)
    headers["X-Request-Id"] = headers["Request-Id"] = id  # the second is Anthropic's name for it
    headers["Server"] = SERVER
    headers["Access-Control-Allow-Origin"] = "*"
    headers["Access-Control-Expose-Headers"] = EXPOSED_HEADERS
    if (permit := request.get(PERMIT)) is not None:
        headers.update(permit.account.headers())
    if texts := request.get(WARNINGS):
        headers[HEADER] = header_value(texts)


async def expect(request: web.Request) -> web.StreamResponse | None:
    """Answer `Expect: 100-continue`, and 417 for anything else."""
    if request.headers.get("Expect", "").lower() == "100-continue":
        if request.version < HttpVersion11:
            return None
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
        return None
    return error_response(fault(HttpError(417, "Only 'Expect: 100-continue' is understood.", "bad_expect")))


def _request_id(request: web.Request) -> str:
    for name in ("X-Request-Id", "X-Correlation-Id"):
        if _ID.fullmatch(sent := request.headers.get(name, "")):
            return sent
    return f"req_{random_hex(24)}"
