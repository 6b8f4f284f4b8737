"""What the program reads of its surroundings: environment variables, and JSON files of models.

A variable that is not named here is not read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.errors import ModelError

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


def load_cuda_modules_eagerly() -> None:
    """Have CUDA load its code at the start, unless the variable says otherwise: a GPU that waits for another
    keeps a module from being loaded. Call before CUDA is used."""
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")


def cache_dir() -> Path:
    """Directory for downloads. It is not created here."""
    if own := read("LOOM_CACHE"):
        return Path(own)
    base = read("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "loom"


def read_json(path: Path) -> Any:
    """Content of a file; None without it. Raises `ModelError` for what is not JSON."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}.") from error


def read_object(path: Path) -> dict[str, Any] | None:
    """An object from a file; None without it. Raises `ModelError` for anything else."""
    content = read_json(path)
    if content is not None and not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object.")
    return content
