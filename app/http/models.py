"""What the model is: `/v1/models`, `/model_info`."""

from __future__ import annotations

from aiohttp import web

from app.http.keys import SERVICE
from app.http.reply import json_response
from app.http.sampling import check_model
from app.service import Loaded


def _model(loaded: Loaded) -> dict[str, object]:
    card = loaded.card
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "loom",
        "root": card.path,
        "parent": None,
        "max_model_len": card.context_length,
    }


async def models(request: web.Request) -> web.StreamResponse:
    """The list with the one model."""
    return json_response({"object": "list", "data": [_model(request.app[SERVICE].loaded)]})


async def model(request: web.Request) -> web.StreamResponse:
    """One model by name."""
    loaded = request.app[SERVICE].loaded
    check_model(loaded, request.match_info["id"])
    return json_response(_model(loaded))


async def model_info(request: web.Request) -> web.StreamResponse:
    """SGLang's names for what the model is; its bench takes the tokenizer from here."""
    card = request.app[SERVICE].loaded.card
    return json_response(
        {
            "model_path": card.path,
            "tokenizer_path": card.path,
            "served_model_name": card.name,
            "is_generation": True,
            "architecture": card.architecture,
            "max_context_length": card.context_length,
            "vocab_size": card.vocab_size,
            "dtype": card.dtype,
        }
    )
