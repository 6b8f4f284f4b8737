"""`/openapi.json`: made from the router and the Structs that bodies are decoded with, so that it cannot
say anything else than the server does."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from app.api.admin.admin import VERSION, health
from app.api.openapi_table import ABOUT, NEEDED, About, Schema
from app.http.keys import SERVE
from app.http.middleware import ANTHROPIC_PATH, COHERE_PATHS, OLLAMA_PATH, OPEN_PATHS, under
from app.http.server import root_path

Route = tuple[str, str, Handler]
"""Method, path with `{names}`, handler."""

ALWAYS = (400, 500, 503)
"""Bad HTTP, a fault of ours, and a server that starts or drains: any route."""
WITH_BODY = (408, 413, 415, 417)

_REF = "#/components/schemas/"
_ERRORS: Mapping[str, Schema] = {
    "Error": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
            }
        },
    },
    "AnthropicError": {
        "type": "object",
        "required": ["type", "error", "request_id"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            },
            "request_id": {"type": "string"},
        },
    },
    "CohereError": {
        "type": "object",
        "required": ["message", "id"],
        "properties": {"message": {"type": "string"}, "id": {"type": "string"}},
    },
    "OllamaError": {
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"type": "string"}},
    },
    "Health": {"type": "object", "required": ["status", "stage", "progress", "reason"]},
}
_EVENT: Schema = {
    "type": "object",
    "required": ["data"],
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
}
"""One event of a stream: before 3.2 the format has no other way to speak of them."""
_KEYS: Mapping[str, Schema] = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


async def openapi(request: web.Request) -> web.StreamResponse:
    """This document. Made when it is first asked for."""
    routes = []
    for route in request.app.router.routes():
        assert route.resource is not None
        routes.append((route.method, route.resource.canonical, route.handler))
    serve = request.app[SERVE]
    body = encoded(tuple(routes), bool(serve.api_key), root_path(serve))
    return web.Response(body=body, content_type="application/json")


@lru_cache(maxsize=2)
def encoded(routes: tuple[tuple[str, str, Any], ...], keyed: bool, prefix: str) -> bytes:
    """`document` as JSON: some 10 ms, once."""
    return msgspec.json.encode(document(routes, keyed, prefix))


def document(routes: Iterable[Route], keyed: bool, prefix: str = "") -> Schema:
    """OpenAPI 3.1 for `routes`; `keyed`: clients must send a key; `prefix`: what a proxy shows before every
    path. Raises `KeyError` for a handler that `openapi_table` does not know."""
    paths: dict[str, Schema] = {}
    for method, path, handler in routes:
        about = About(has=("openapi", "info", "paths")) if handler is openapi else ABOUT[handler]
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, handler, about)
    told: Schema = {
        "openapi": "3.1.0",
        "info": {"title": "Loom", "version": VERSION},
        "paths": paths,
        "components": {"schemas": {**_bodies(), **_ERRORS}},
    }
    if prefix:
        told["servers"] = [{"url": prefix}]
    if keyed:
        told["components"]["securitySchemes"] = _KEYS
        told["security"] = [{name: []} for name in _KEYS]
    return told


def _bodies() -> dict[str, Schema]:
    """The Structs by name. A field that a body must have is neither absent nor null."""
    structs = [about.body for about in ABOUT.values() if about.body is not None]
    _, schemas = msgspec.json.schema_components(dict.fromkeys(structs), ref_template=_REF + "{name}")
    for struct, names in NEEDED.items():
        schema = schemas[struct.__name__]
        schema["required"] = list(names)
        for name in names:
            kinds = [kind for kind in schema["properties"][name]["anyOf"] if kind != {"type": "null"}]
            schema["properties"][name] = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    return schemas


def _operation(method: str, path: str, handler: Handler, about: About) -> Schema:
    told: Schema = {
        "summary": about.summary or _first_sentence(handler),
        "operationId": method.lower() + re.sub(r"\W+", "_", path),
        "responses": _responses(method, path, handler, about),
    }
    named = re.findall(r"{(\w+)}", path)
    where = [_parameter(name, "path", {"type": "string", "minLength": 1}) for name in named]
    if parameters := where + [_parameter(name, "query", schema) for name, schema in about.query.items()]:
        told["parameters"] = parameters
    if about.body is not None:
        content: Schema = {"schema": {"$ref": _REF + about.body.__name__}}
        if about.example is not None:
            content["example"] = about.example
        told["requestBody"] = {"required": not about.optional, "content": {"application/json": content}}
    elif about.form is not None:
        told["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": about.form}}}
    if path in OPEN_PATHS:
        told["security"] = []
    return told


def _parameter(name: str, place: str, schema: Schema) -> Schema:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


def _responses(method: str, path: str, handler: Handler, about: About) -> dict[str, Schema]:
    failed = {*ALWAYS, *about.errors, *(() if path in OPEN_PATHS else (401,))}
    if about.body is not None or about.form is not None:
        failed.update(WITH_BODY)
    told = {200: _answer("As asked.", _contents(about))}
    for status in sorted(failed):
        error: Schema = {"$ref": _REF + _error(path)}
        if status == 503 and handler is health:
            error = {"anyOf": [error, {"$ref": _REF + "Health"}]}
        told[status] = _answer(HTTPStatus(status).phrase, {"application/json": {"schema": error}})
    if method == "HEAD":
        told = {status: _answer(each["description"], {}) for status, each in told.items()}
    return {str(status): each for status, each in told.items()}


def _error(path: str) -> str:
    """The shape of errors there."""
    if under(path, ANTHROPIC_PATH):
        return "AnthropicError"
    if under(path, *COHERE_PATHS):
        return "CohereError"
    return "OllamaError" if path.startswith(OLLAMA_PATH) else "Error"


def _answer(description: str, content: Schema) -> Schema:
    return {"description": description, **({"content": content} if content else {})}


def _contents(about: About) -> Schema:
    if about.media != "application/json":
        return {about.media: {"schema": {"type": "string"}}}
    kinds: list[Schema] = [{"type": "string"}] if about.string else []
    if about.has:
        kinds.append({"type": "object", "required": list(about.has)})
    if about.lists:
        kinds.append({"type": "array", "items": dict(kinds[0]) if kinds else {"type": "object"}})
    contents: Schema = {about.media: {"schema": kinds[0] if len(kinds) == 1 else {"anyOf": kinds}}}
    if about.streams:
        contents["text/event-stream"] = {"schema": _EVENT}
    if about.lines:
        contents["application/x-ndjson"] = {"schema": {"type": "string"}}
    return contents


def _first_sentence(handler: Handler) -> str:
    text = " ".join((handler.__doc__ or "").split())
    return re.split(r"(?<=\.) ", text)[0]
