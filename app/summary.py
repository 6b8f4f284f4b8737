"""The last lines of a start: what is served where, how to try it, and how to stop it."""

from __future__ import annotations

import json
import os
import shlex

from app.listen import Address
from app.service import Loaded
from core.config import ServeConfig

OPEN = "anybody who reaches this port, control routes included: set --api-key to change that"


def summary(address: Address, serve: ServeConfig, loaded: Loaded, memory: tuple[str, ...]) -> list[str]:
    """Lines for the log. `memory` says what each device holds, one phrase a part."""
    card = loaded.card
    through = ", through transformers" if card.implementation == "transformers" else ""
    return [
        f"Loom serves {card.name} at {address}",
        f"  model    {card.architecture} in {card.dtype} on {card.device}{through}",
        f"  context  {card.context_length:,} tokens",
        f"  memory   {', '.join(memory)}",
        *([f"  access   {OPEN}"] if address.remote and not serve.keyed else []),
        f"  try it   {_curl(address, serve, loaded)}",
        f"  stop     Ctrl-C or kill {os.getpid()}: requests get {serve.drain_timeout:g} s to finish",
    ]


def _curl(address: Address, serve: ServeConfig, loaded: Loaded) -> str:
    path, body = _request(loaded)
    words = ["curl", address.url + path]
    if address.uds:
        words[1:1] = ["--unix-socket", address.uds]
    if serve.ssl_certfile:
        words += ["--cacert", serve.ssl_certfile]
    words += ["-H", "Content-Type: application/json"]
    line = shlex.join([*words, "-d", json.dumps(body)])
    return line + ' -H "Authorization: Bearer $LOOM_API_KEY"' if serve.keyed else line


def _request(loaded: Loaded) -> tuple[str, dict[str, object]]:
    match loaded.card.task:
        case "embed":
            return "/v1/embeddings", {"input": "Hello!"}
        case "classify":
            return "/v1/classify", {"input": "Hello!"}
        case _ if loaded.template.source:
            return "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello!"}]}
        case _:
            return "/v1/completions", {"prompt": "Once upon a time", "max_tokens": 32}
