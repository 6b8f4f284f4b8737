"""Valid request bodies, and mutations of them: values replaced or dropped, bytes damaged."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from bench.chaos.clients import CHAT, NATIVE, TEXT

BODIES: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hé😀"}]}],
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "presence_penalty": 0.1,
        "logit_bias": {"5": 1.5},
        "seed": 3,
        "n": 2,
        "max_tokens": 4,
        "stop": ["zz"],
        "stop_regex": "a+b",
        "logprobs": True,
        "top_logprobs": 2,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "chat_template_kwargs": {"k": 1},
    },
    TEXT: {
        "prompt": "hello",
        "echo": True,
        "logprobs": 2,
        "max_tokens": 3,
        "min_tokens": 1,
        "stop_token_ids": [7],
        "stream": True,
        "stream_options": {"include_usage": True},
        "truncate_prompt_tokens": 3,
    },
    NATIVE: {
        "text": ["a", "b"],
        "sampling_params": {"max_new_tokens": 3, "n": 2, "min_p": 0.1, "sampling_seed": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
    },
    "/tokenize": {"prompt": "héllo", "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2, 299]},
    "/abort_request": {"rid": "unknown"},
}
VALUES: list[Any] = [
    *(None, True, 0, -1, 2, 129, 2**31, 2**63, -(2**63), 10**30, 0.5, 1e308, -1e308, 1e-320),
    *(float("nan"), float("inf"), "", "a", "x" * 3000, "\ud800", "\x00", "{{7*7}}", [], [None], [[]], [[1]]),
    *([300], [-1], ["a", 1], ["a"] * 70, ["(a+)+$", "\\"], {}, {"a": 1}, {"999": 1}, {"1": 1e308}),
    *([{"type": "image_url"}], [{"role": "user", "content": "x"}], {"type": "json_object"}),
]


def locations(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) inside a body."""
    for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(item, dict | list):
            yield from locations(item)


def mutated(body: dict[str, Any], rng: random.Random) -> bytes:
    """A valid body with a few values replaced or dropped, or its bytes damaged."""
    body = json.loads(json.dumps(body))
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        container, key = rng.choice(list(locations(body)) or [(body, "x")])
        if rng.random() < 0.85:
            container[key] = deepcopy(rng.choice(VALUES))  # a copy, so that a list cannot contain itself
        elif key in container:
            del container[key]
    data = json.dumps(body).encode()
    damage, at = rng.random(), rng.randrange(len(data))
    if damage < 0.06:
        return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    return data[:at] if damage < 0.09 else data
