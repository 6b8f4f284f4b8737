"""Requests for what this build cannot do: a clear 400 naming the field.

Ignoring a constraint would answer with output that the client believes is constrained.
"""

from __future__ import annotations

from app.http.schema import Refused
from core.errors import RequestError

_FIELDS: dict[str, str] = {
    "logit_processors": "logits processors cannot be sent with a request",
    "logits_processors": "logits processors cannot be sent with a request",
    "use_beam_search": "beam search is not available",
    "lora_path": "adapters are not available on this server",
    "prompt_embeds": "prompts are taken as text or token ids only",
    "input_embeds": "prompts are taken as text or token ids only",
    "chat_template": "chat templates are set by the operator; clients cannot send one",
    "return_routed_experts": "experts are not told",
    "return_entropy": "entropies are not told",
    "return_sampling_mask": "the tokens that were left to choose from are not told",
    "image_data": "this model takes text only",
    "video_data": "this model takes text only",
    "audio_data": "this model takes text only",
    "suffix": "text insertion is not available",
}

_UNSET: tuple[object, ...] = (None, False, "", [], {})
"""What clients send for "not wanted"."""


def refuse_unsupported(body: Refused, prefix: str = "") -> None:
    """Raise `RequestError` for the first field that asks for what is not there."""
    for name, reason in _FIELDS.items():
        if getattr(body, name) not in _UNSET:
            raise RequestError(f"'{prefix}{name}' is not supported: {reason}.", prefix + name, "unsupported")
