"""Every environment variable the program reads. A name that is not here is not read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

VARIABLES: Mapping[str, str] = {
    "LOOM_CACHE": "where fetched models are kept; default: $XDG_CACHE_HOME/loom or ~/.cache/loom",
    "XDG_CACHE_HOME": "the user's cache directory, when LOOM_CACHE is unset",
    "HF_HUB_OFFLINE": "1 means: never reach the network for a model (the same as --offline)",
}


def read(name: str) -> str | None:
    """Value of a declared variable, or None when unset or empty."""
    if name not in VARIABLES:
        raise KeyError(f"{name} is not declared in core/env.py")
    return os.environ.get(name) or None


def cache_dir() -> Path:
    """Directory for downloads. It is not created here."""
    if own := read("LOOM_CACHE"):
        return Path(own)
    base = read("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "loom"
