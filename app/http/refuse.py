"""Requests for what this build cannot do: a clear 400 naming the field.

Ignoring a constraint would answer with output that the client believes is constrained.
"""

from __future__ import annotations

from collections.abc import Collection

from app.http.schema import Refused
from core.errors import RequestError

_FIELDS: dict[str, str] = {
    "logit_processors": "logits processors cannot be sent with a request",
    "logits_processors": "logits processors cannot be sent with a request",
    "use_beam_search": "beams are searched by /v1/completions and /v1/chat/completions",
    "lora_path": "adapters are not available on this server",
    "prompt_embeds": "embeddings are taken by /v1/completions",
    "input_embeds": "embeddings are taken by /generate",
    "chat_template": "a chat template is taken where messages are",
    "image_data": "this model takes text only",
    "video_data": "this model takes text only",
    "audio_data": "this model takes text only",
    "suffix": "text is inserted by /v1/completions",
}

_UNSET: tuple[object, ...] = (None, False, "", [], {})
"""What clients send for "not wanted"."""


def refuse_unsupported(body: Refused, prefix: str = "", takes: Collection[str] = ()) -> None:
    """Raise `RequestError` for the first field that asks for what is not there. `takes` are those that this
    route knows."""
    for name, reason in _FIELDS.items():
        if name not in takes and getattr(body, name) not in _UNSET:
            raise RequestError(f"'{prefix}{name}' is not supported: {reason}.", prefix + name, "unsupported")
