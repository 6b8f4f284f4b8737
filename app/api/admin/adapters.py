"""Routes that load and unload LoRA adapters, under SGLang's and vLLM's names, with both their answers."""

from __future__ import annotations

import msgspec
from aiohttp import web

from app.api.request.routing import Routes
from app.api.request.sampling import accepting
from app.http.keys import SERVE
from app.service import Loaded, Service
from core.errors import field_error

ROUTES = Routes()


class LoadBody(msgspec.Struct, kw_only=True):
    """A directory on the server's disk. `pinned`, after SGLang: it always stays in memory."""

    lora_name: str | None = None
    lora_path: str | None = None
    pinned: bool | None = None


class UnloadBody(msgspec.Struct, kw_only=True):
    """A loaded adapter."""

    lora_name: str | None = None


def _model(service: Service, *_: object) -> Loaded:
    """The body's `lora_path` is no adapter to select."""
    return accepting(service)


async def _load(body: LoadBody, loaded: Loaded) -> str:
    if not body.lora_name:
        raise field_error("lora_name", "is missing")
    if not body.lora_path:
        raise field_error("lora_path", "is missing")
    return (await loaded.adapters.load(body.lora_name, body.lora_path, body.pinned is True)).name


async def _unload(body: UnloadBody, loaded: Loaded) -> str:
    if not body.lora_name:
        raise field_error("lora_name", "is missing")
    return (await loaded.adapters.unload(body.lora_name)).name


def _listed(request: web.Request, loaded: Loaded) -> object:
    """SGLang's answer. With an API key names stand for paths, which clients should not learn."""
    listed = loaded.adapters.listed
    hidden = bool(request.app[SERVE].keyed)
    loaded_adapters = {each.name: each.name if hidden else each.path for each in listed}
    return {"success": True, "loaded_adapters": loaded_adapters}


@ROUTES.post(
    LoadBody,
    "/load_lora_adapter",
    needed="lora_name lora_path",
    has="success loaded_adapters",
    admin=True,
    model=_model,
)
async def load(request: web.Request, body: LoadBody, loaded: Loaded) -> object:
    """Load an adapter, after SGLang."""
    await _load(body, loaded)
    return _listed(request, loaded)


@ROUTES.post(
    UnloadBody,
    "/unload_lora_adapter",
    needed="lora_name",
    has="success loaded_adapters",
    errors=(404,),
    admin=True,
    model=_model,
)
async def unload(request: web.Request, body: UnloadBody, loaded: Loaded) -> object:
    """Unload an adapter when the requests that have it have ended, after SGLang."""
    await _unload(body, loaded)
    return _listed(request, loaded)


@ROUTES.post(
    LoadBody,
    "/v1/load_lora_adapter",
    needed="lora_name lora_path",
    media="text/plain",
    admin=True,
    model=_model,
)
async def add(request: web.Request, body: LoadBody, loaded: Loaded) -> object:
    """Load an adapter, after vLLM."""
    return web.Response(text=f"Success: LoRA adapter '{await _load(body, loaded)}' added successfully.")


@ROUTES.post(
    UnloadBody,
    "/v1/unload_lora_adapter",
    needed="lora_name",
    media="text/plain",
    errors=(404,),
    admin=True,
    model=_model,
)
async def remove(request: web.Request, body: UnloadBody, loaded: Loaded) -> object:
    """Unload an adapter when the requests that have it have ended, after vLLM."""
    return web.Response(text=f"Success: LoRA adapter '{await _unload(body, loaded)}' removed successfully.")
