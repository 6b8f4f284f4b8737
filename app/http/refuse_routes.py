"""Routes of models that do not generate: clients that ask for them learn why not here."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from core.errors import RequestError

_EMBED = "an embedding checkpoint: an encoder, or a decoder trained for embeddings"
_RERANK = "a reranking checkpoint: a cross-encoder"
_CLASSIFY = "a checkpoint with a classification or reward head"

_NEEDS: Mapping[str, str] = {
    "/v1/embeddings": _EMBED,
    "/embeddings": _EMBED,
    "/v1/rerank": _RERANK,
    "/rerank": _RERANK,
    "/v2/rerank": _RERANK,
    "/v1/classify": _CLASSIFY,
    "/classify": _CLASSIFY,
    "/pooling": "an embedding, classification or reward checkpoint",
}
"""Route to the kind of checkpoint that could answer it."""


async def refuse(request: web.Request) -> web.StreamResponse:
    """Refused: the model generates text. Raises `RequestError`, always."""
    raise RequestError(
        f"This model generates text. {request.path} needs {_NEEDS[request.path]}.",
        "model",
        "unsupported_model",
    )


TABLE = tuple(("POST", path, refuse) for path in _NEEDS)
