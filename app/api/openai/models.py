"""Facts about the model: `/v1/models`, `/model_info`, `/tokenizer_info`."""

from __future__ import annotations

from datetime import UTC, datetime

from aiohttp import web

from app.api.request.routing import Routes
from app.api.request.sampling import selected, served_names
from app.http.keys import SERVE, SERVICE
from app.http.tenant import permit

ROUTES = Routes()

_VERSION = "Anthropic-Version"
"""A header that Anthropic's clients send."""


def _model(request: web.Request, name: str, parent: str | None = None) -> dict[str, object]:
    """A model, or an adapter of `parent`, also in the fields of Anthropic's API where its client asks."""
    card = request.app[SERVICE].loaded.card
    model: dict[str, object] = {
        "id": name,
        "object": "model",
        "created": card.created,
        "owned_by": "loom",
        "root": name if parent else card.name,
        "parent": parent,
        "max_model_len": card.context_length,
    }
    if _VERSION in request.headers:
        model |= {"type": "model", "display_name": name, "max_input_tokens": card.context_length}
        model["created_at"] = datetime.fromtimestamp(card.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return model


@ROUTES.add("GET /v1/models", has="object data")
async def models(request: web.Request) -> object:
    """The list with the one model, by all its names, and its adapters, as far as the API key may use them."""
    loaded, allows = request.app[SERVICE].loaded, permit().terms.allows
    data = [_model(request, name) for name in served_names(loaded)]
    listed = loaded.adapters.listed
    data += [_model(request, each.name, loaded.card.name) for each in listed if allows(each.name)]
    answer: dict[str, object] = {"object": "list", "data": data}
    if _VERSION in request.headers:
        ids = [each["id"] for each in data] or [None]
        answer |= {"has_more": False, "first_id": ids[0], "last_id": ids[-1]}
    return answer


@ROUTES.add("GET /v1/models/{id:.+}", has="id object created owned_by")
async def model(request: web.Request) -> object:
    """One model or adapter by name."""
    loaded = request.app[SERVICE].loaded
    adapter = selected(loaded, name := request.match_info["id"]).adapter
    if adapter is not None:
        return _model(request, adapter.name, loaded.card.name)
    return _model(request, name if name in loaded.card.names else loaded.card.name)


@ROUTES.add("GET /model_info", "GET /get_model_info", has="model_path tokenizer_path served_model_name")
async def model_info(request: web.Request) -> object:
    """Facts about the model under SGLang's names. Its benchmark loads the tokenizer from the path here. With
    an API key the name is given in place of the path, which clients should not learn."""
    card = request.app[SERVICE].loaded.card
    place = card.name if request.app[SERVE].keyed else card.path
    return {
        "model_path": place,
        "tokenizer_path": place,
        "served_model_name": card.name,
        "is_generation": card.task == "generate",
        "architecture": card.architecture,
        "max_context_length": card.context_length,
        "vocab_size": card.vocab_size,
        "dtype": card.dtype,
    }


@ROUTES.add("GET /tokenizer_info", has="tokenizer_class")
async def tokenizer_info(request: web.Request) -> object:
    """The special tokens and the chat template, after vLLM; lm-eval needs no tokenizer of its own then."""
    loaded = request.app[SERVICE].loaded
    answer: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    answer |= loaded.tokenizer.special_tokens
    if loaded.template.source:
        answer["chat_template"] = loaded.template.source
    return answer
