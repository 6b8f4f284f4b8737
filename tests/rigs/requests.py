"""Request bodies of three dialects."""

from __future__ import annotations

from typing import Any

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"


def body(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    base = {
        CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
        COMPLETIONS: {"prompt": "a", "max_tokens": 2},
        GENERATE: {"text": "a"},
    }[path]
    if path == GENERATE:
        return {**base, "sampling_params": {"max_new_tokens": 2, **fields}}
    return {**base, **fields}
