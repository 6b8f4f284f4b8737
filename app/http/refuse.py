"""Requests for what this build cannot do: a clear 400 naming the field.

Ignoring a constraint would answer with output that the client believes is constrained.
"""

from __future__ import annotations

from typing import Any

from app.http.schema import Refused
from core.errors import RequestError

_CONSTRAINT = "constrained decoding is not available on this server"

_FIELDS: dict[str, str] = {
    "regex": _CONSTRAINT,
    "ebnf": _CONSTRAINT,
    "json_schema": _CONSTRAINT,
    "structural_tag": _CONSTRAINT,
    "structured_outputs": _CONSTRAINT,
    "guided_json": _CONSTRAINT,
    "guided_regex": _CONSTRAINT,
    "guided_choice": _CONSTRAINT,
    "guided_grammar": _CONSTRAINT,
    "bad_words": _CONSTRAINT,
    "allowed_token_ids": _CONSTRAINT,
    "logit_processors": "logits processors cannot be sent with a request",
    "logits_processors": "logits processors cannot be sent with a request",
    "custom_logit_processor": "logits processors cannot be sent with a request",
    "use_beam_search": "beam search is not available",
    "lora_path": "adapters are not available on this server",
    "prompt_embeds": "prompts are taken as text or token ids only",
    "input_embeds": "prompts are taken as text or token ids only",
    "return_hidden_states": "hidden states are not available",
    "thinking_token_budget": "a thinking budget is not available",
    "max_thinking_tokens": "a thinking budget is not available",
    "chat_template": "chat templates are set by the operator; clients cannot send one",
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
    wanted = body.response_format
    if wanted is None:
        return
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if not isinstance(kind, str):
        raise RequestError(
            "'response_format' must be an object with a 'type'.", prefix + "response_format.type"
        )
    if kind != "text":
        raise RequestError(
            f"'response_format' of type '{kind[:40]}' is not supported: {_CONSTRAINT}.",
            prefix + "response_format",
            "unsupported",
        )


def check_tool_choice(choice: str | dict[str, Any] | None) -> None:
    """`none` and `auto` only: anything else must constrain the output."""
    if choice not in (None, "none", "auto"):
        raise RequestError(
            f"'tool_choice' must be 'none' or 'auto': {_CONSTRAINT}.", "tool_choice", "unsupported"
        )
