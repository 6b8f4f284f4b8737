"""`python -m app pull`: downloads the model, draft model and adapters that the same flags would serve."""

from __future__ import annotations

import sys

from app import logs
from app.checkpoint.checkpoint import resolve_adapter, resolve_draft
from app.compose import find
from core.adapters import adapters_at_start
from core.config import Config


def run(config: Config) -> int:
    """Print where each lies. Returns the exit code; raises `ConfigError`. The hub's library and pip show bars
    on a terminal."""
    logs.set_up("warning")
    checkpoint = find(config, _say)
    print(f"{checkpoint.names[0]}: {checkpoint.path}, {checkpoint.size / 2**20:,.1f} MiB of weights")
    if (draft := resolve_draft(config.speculative.draft_model_path, config.model, _say)) is not None:
        print(f"{config.speculative.draft_model_path}: {draft}")
    for adapter in adapters_at_start(config.lora):
        print(f"{adapter.name}: {resolve_adapter(adapter.path, config.model, _say)}")
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr)
