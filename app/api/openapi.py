"""`/openapi.json`: made from the routes and the Structs that bodies are decoded with, so that it says what
the server does."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from http import HTTPStatus

import msgspec
from aiohttp import web

from app.api.admin.admin import health
from app.api.request.routing import Facts, Route, Routes, Schema, runs
from app.http.errors import ERRORS
from app.http.keys import SERVE
from app.http.middleware import error_class, is_open
from app.http.server import root_path
from app.process import VERSION

ROUTES = Routes()
DOCUMENTED = web.AppKey("documented", tuple)

ALWAYS = (400, 500, 503)
"""Statuses of every route: malformed HTTP, an internal error, a server that starts or drains."""
WITH_BODY = (408, 413, 415, 417)

_REF = "#/components/schemas/"
_HEALTH: Schema = {"type": "object", "required": ["status", "stage", "progress", "reason"]}
_EVENT: Schema = {
    "type": "object",
    "required": ["data"],
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
}
"""One event of a stream: OpenAPI before 3.2 cannot describe the stream itself."""
_GENERATED = {"choices": [{"token_ids": [1, 2], "finish_reason": "stop"}]}
_SAMPLES: Mapping[str, object] = {
    "abort_all": True,
    "documents": ["Yes", {"text": "No"}],
    "generate_response": _GENERATED,
    "generate_responses": [_GENERATED],
    "input": "Once upon a time",
    "items": ["Yes", "No"],
    "label_token_ids": [1, 2],
    "lora_name": "sql",
    "lora_path": "/adapters/sql",
    "messages": [{"role": "user", "content": "Hello"}],
    "prompt": "Once upon a time",
    "query": "Is it? ",
    "reasoning_parser": "think",
    "request_ids": ["a"],
    "session_id": "s",
    "text": "Once upon a time",
    "token_ids": [1, 2],
    "tokens": [1, 2],
    "tool_call_parser": "hermes",
}
"""Values of fields in examples."""
_KEYS: Mapping[str, Schema] = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


@ROUTES.add("GET /openapi.json", has="openapi info paths")
async def openapi(request: web.Request) -> web.StreamResponse:
    """This document. Made on the first request."""
    serve = request.app[SERVE]
    body = encoded(request.app[DOCUMENTED], serve.keyed, root_path(serve))
    return web.Response(body=body, content_type="application/json")


@lru_cache(maxsize=2)
def encoded(routes: tuple[Route, ...], keyed: bool, prefix: str) -> bytes:
    """`document` as JSON. Takes some 10 ms once."""
    return msgspec.json.encode(document(routes, keyed, prefix))


def document(routes: Sequence[Route], keyed: bool, prefix: str = "") -> Schema:
    """OpenAPI 3.1 for `routes`; `keyed`: clients must send a key; `prefix`: of every path behind a
    proxy."""
    paths: dict[str, Schema] = {}
    for route in routes:
        path = re.sub(r"{(\w+):[^}]*}", r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(path, route)
    doc: Schema = {
        "openapi": "3.1.0",
        "info": {"title": "Loom", "version": VERSION},
        "paths": paths,
        "components": {"schemas": {**_structs([route.facts for route in routes]), "Health": _HEALTH}},
    }
    if prefix:
        doc["servers"] = [{"url": prefix}]
    if keyed:
        doc["components"]["securitySchemes"] = _KEYS
        doc["security"] = [{name: []} for name in _KEYS]
    return doc


def _structs(facts: Sequence[Facts]) -> dict[str, Schema]:
    """Bodies and errors by name. A field that a body must have is neither absent nor null."""
    bodies = dict.fromkeys(each["body"] for each in facts if "body" in each)
    _, schemas = msgspec.json.schema_components([*bodies, *ERRORS], ref_template=_REF + "{name}")
    needed = {each["body"].__name__: each["needed"].split() for each in facts if "needed" in each}
    for struct, names in needed.items():
        schema = schemas[struct]
        schema["required"] = names
        for name in names:
            kinds = [kind for kind in schema["properties"][name]["anyOf"] if kind != {"type": "null"}]
            schema["properties"][name] = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    return schemas


def _operation(path: str, route: Route) -> Schema:
    facts = route.facts
    operation: Schema = {
        # The first sentence.
        "summary": re.split(r"(?<=\.) ", " ".join((route.handler.__doc__ or "").split()))[0],
        "operationId": route.method.lower() + re.sub(r"\W+", "_", path),
        "responses": _responses(path, route),
    }
    named = {name: {"type": "string", "minLength": 1} for name in re.findall(r"{(\w+)}", path)}
    parameters = [_parameter(name, "path", schema) for name, schema in named.items()]
    parameters += [_parameter(name, "query", schema) for name, schema in facts.get("query", {}).items()]
    if parameters:
        operation["parameters"] = parameters
    if "body" in facts:
        content: Schema = {"schema": {"$ref": _REF + facts["body"].__name__}}
        if (example := _example(facts)) is not None:
            content["example"] = example
        required = not facts.get("optional", False)
        operation["requestBody"] = {"required": required, "content": {"application/json": content}}
    elif "form" in facts:
        form = {"multipart/form-data": {"schema": facts["form"]}}
        operation["requestBody"] = {"required": True, "content": form}
    if is_open(path):
        operation["security"] = []
    return operation


def _example(facts: Facts) -> Schema | None:
    example = facts.get("example", facts.get("needed"))
    if not isinstance(example, str):
        return example
    names = example.split()
    if any(name not in _SAMPLES for name in names):
        return None
    fields = facts["body"].__struct_fields__
    lengths = [name for name in ("max_output_tokens", "max_tokens") if name in fields]
    return {name: _SAMPLES[name] for name in names} | dict.fromkeys(lengths[:1], 16)


def _parameter(name: str, place: str, schema: Schema) -> Schema:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


def _responses(path: str, route: Route) -> dict[str, Schema]:
    responses = {200: _answer("Success.", _contents(route.facts))}
    for status in sorted(_statuses(path, route.facts)):
        error: Schema = {"$ref": _REF + error_class(path).__name__}
        if status == 503 and route.handler is health:
            error = {"anyOf": [error, {"$ref": _REF + "Health"}]}
        responses[status] = _answer(HTTPStatus(status).phrase, {"application/json": {"schema": error}})
    if route.method == "HEAD":
        responses = {status: _answer(each["description"], {}) for status, each in responses.items()}
    return {str(status): each for status, each in responses.items()}


def _statuses(path: str, facts: Facts) -> set[int]:
    """Statuses of a route's errors."""
    statuses = {*ALWAYS, *facts.get("errors", ())}
    if not is_open(path):
        statuses.add(401)
    if "body" in facts or "form" in facts:
        statuses.update(WITH_BODY)
    if facts.get("admin"):
        statuses.add(403)
    if runs(facts):
        statuses.update((404, 429))
    if "{" in path or ("body" in facts and "model" in facts["body"].__struct_fields__):
        statuses.add(404)
    return statuses


def _answer(description: str, content: Schema) -> Schema:
    return {"description": description, **({"content": content} if content else {})}


def _contents(facts: Facts) -> Schema:
    text: Schema = {facts["media"]: {"schema": {"type": "string"}}} if "media" in facts else {}
    if text and "has" not in facts:
        return text
    kinds: list[Schema] = [{"type": "string"}] if facts.get("string") else []
    if "has" in facts:
        kinds.append({"type": "object", "required": facts["has"].split()})
    if facts.get("lists"):
        kinds.append({"type": "array", "items": dict(kinds[0]) if kinds else {"type": "object"}})
    json: Schema = {"schema": kinds[0] if len(kinds) == 1 else {"anyOf": kinds}}
    contents: Schema = {"application/json": json, **text}
    if facts.get("streams"):
        contents["text/event-stream"] = {"schema": _EVENT}
    if facts.get("lines"):
        contents["application/x-ndjson"] = {"schema": {"type": "string"}}
    return contents
