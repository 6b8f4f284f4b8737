"""`python -m app check-config`: the settings that a start with the same flags would have."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from app.flags import Given
from core.config import Config


def run(config: Config, given: Given) -> int:
    """Print all settings as a file for `--config`, and beside those that were given as what. Returns the exit
    code."""
    print("\n".join(lines(config, given)))
    return 0


def lines(config: Config, given: Given) -> list[str]:
    """The file. API keys are counted only."""
    made: list[str] = []
    for title, group in msgspec.to_builtins(config).items():
        made += ["", f"# {title}"] if made else [f"# {title}"]
        for name, value in group.items():
            key, origin = name.replace("_", "-"), given.origins.get(name, "")
            line = f"{key} = {_toml(value)}"
            if name == "api_key":
                line = f"# {key}: {len(value)}, not shown"
            made.append(f"{line}  # {origin}" if origin else line)
    return made


def _toml(value: Any) -> str:
    """JSON's texts, numbers, lists and booleans are TOML's too."""
    return json.dumps(value, ensure_ascii=False)
