"""Ollama's routes over the one model. A stream is lines of JSON; errors are a plain text
(`app/http/middleware.py`)."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial

import msgspec
from aiohttp import web

from app.api.ollama.lines import Lines
from app.api.ollama.schema import (
    NAMES,
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaShowBody,
    chat_body,
    model_name,
    raw_body,
)
from app.api.openai.chat import chat_job, chat_spec
from app.api.openai.completions import completion_jobs
from app.api.request.routing import Routes
from app.api.request.sampling import ready, request_id, selected, served_names
from app.engine.job import Job
from app.engine.reasoning_budget import Watch
from app.http.answer import answer
from app.http.aside import aside
from app.http.errors import OllamaError
from app.http.keys import SERVICE
from app.http.sse import Dialect
from app.parsers.reading import Reading
from app.process import VERSION
from app.service import Loaded, Service

ROUTES = Routes()


NEVER = "2318-01-01T00:00:00Z"
"""`expires_at` of a model that stays loaded: Ollama's clients parse a date, and have no word for none."""


def _find(service: Service, name: str | None, lora_path: str | None) -> Loaded:
    return ready(service, model_name(name, service.loaded), lora_path)


LINES = Dialect(
    error=lambda fault, id: fault.body(OllamaError) + b"\n", keep_alive=b"", media="application/x-ndjson"
)


@ROUTES.post(
    OllamaChatBody,
    "/api/chat",
    example="messages",
    has="model created_at message done",
    lines=True,
    model=_find,
    names=NAMES,
)
async def chat(request: web.Request, body: OllamaChatBody, loaded: Loaded) -> object:
    """Answer a conversation, after Ollama. Without messages nothing is run: the model is loaded."""
    return await _answered(request, body, loaded) if body.messages else _nothing_run(body, loaded)


@ROUTES.post(
    OllamaGenerateBody,
    "/api/generate",
    example="prompt",
    has="model created_at response done",
    lines=True,
    model=_find,
    names={**NAMES, "messages": "prompt"},
)
async def generate(request: web.Request, body: OllamaGenerateBody, loaded: Loaded) -> object:
    """Answer a prompt, after Ollama. Without one nothing is run: the model is loaded."""
    return await _answered(request, body, loaded) if body.prompt else _nothing_run(body, loaded)


async def _answered(
    request: web.Request, body: OllamaChatBody | OllamaGenerateBody, loaded: Loaded
) -> web.StreamResponse:
    job, watch = await _job(body, loaded)
    spec = chat_spec(job, watch, loaded, partial(Lines, body, loaded), dialect=LINES)
    return await answer(request, spec, body.stream is not False)


def _nothing_run(body: OllamaBody, loaded: Loaded) -> object:
    return Lines(body, loaded, ()).line([], end={"done_reason": "load"})


async def _job(body: OllamaChatBody | OllamaGenerateBody, loaded: Loaded) -> tuple[Job, Watch]:
    if isinstance(body, OllamaGenerateBody) and body.raw:
        completion = raw_body(body)
        (job,) = completion_jobs(completion, request_id(completion, "ollama"), loaded)
        return msgspec.structs.replace(job, max_tokens=completion.max_tokens), Watch(reading=Reading())
    count = len(body.messages or ()) if isinstance(body, OllamaChatBody) else 1
    job, watch = await chat_job(await aside(count, lambda: chat_body(body)), loaded)
    return msgspec.structs.replace(job, cut_to_fit=True), watch


def _details(loaded: Loaded) -> dict[str, object]:
    family = loaded.card.architecture.removesuffix("ForCausalLM").lower()
    return {
        "parent_model": "",
        "format": loaded.card.format,
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": loaded.card.weight_dtype or loaded.card.dtype,
    }


def _listed(loaded: Loaded, **more: object) -> object:
    """The one model, by all its names."""
    shared = {"size": loaded.card.size, "digest": "", "details": _details(loaded), **more}
    return {"models": [{"name": name, "model": name, **shared} for name in served_names(loaded)]}


@ROUTES.add("GET /api/tags", has="models")
async def tags(request: web.Request) -> object:
    """The list with the one model, after Ollama."""
    loaded = request.app[SERVICE].loaded
    made = datetime.fromtimestamp(loaded.card.created, UTC).isoformat()
    return _listed(loaded, modified_at=made)


@ROUTES.add("GET /api/ps", has="models")
async def running_models(request: web.Request) -> object:
    """The models in memory, after Ollama: the one model, which stays there."""
    loaded = request.app[SERVICE].loaded
    on_device = loaded.card.size if loaded.card.device != "cpu" else 0
    context = loaded.card.context_length
    return _listed(loaded, expires_at=NEVER, size_vram=on_device, context_length=context)


@ROUTES.post(
    OllamaShowBody,
    "/api/show",
    example="",
    has="details model_info capabilities",
    model=lambda service, *_: service.loaded,
)
async def show(request: web.Request, body: OllamaShowBody, loaded: Loaded) -> object:
    """What the model is and can do, after Ollama."""
    selected(loaded, model_name(body.model or body.name, loaded))
    card, details = loaded.card, _details(loaded)
    can = [("completion", True), ("tools", loaded.tools), ("thinking", loaded.reasoning)]
    return {
        "modelfile": f"FROM {card.name}",
        "parameters": f"num_ctx {card.context_length}",
        "template": loaded.template.source,
        "details": details,
        "model_info": {
            "general.architecture": details["family"],
            f"{details['family']}.context_length": card.context_length,
            f"{details['family']}.embedding_length": card.hidden_size,
        },
        "capabilities": [name for name, there in can if there] if card.task == "generate" else ["embedding"],
    }


@ROUTES.add("GET /api/version", has="version")
async def version(request: web.Request) -> object:
    """This server's version, where Ollama's clients look for one."""
    return {"version": VERSION}
