"""`--attention-backend`, read. Imports no backend: a CPU may lack what they need."""

from __future__ import annotations

from typing import get_args

from core.errors import ConfigError
from gpu.attention.backend import Phase

AUTO = "auto"

FLAG = "--attention-backend"


def parse_backends(text: str) -> dict[Phase, str]:
    """`prefill=NAME,decode=NAME`, either alone, or one NAME for both; what is not named is `AUTO`.

    Raises `ConfigError`.
    """
    found: dict[Phase, str] = dict.fromkeys(get_args(Phase), AUTO)
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if len(parts) == 1 and "=" not in parts[0]:
        return dict.fromkeys(get_args(Phase), parts[0])
    for part in parts:
        name, _, backend = part.partition("=")
        phase = next((phase for phase in found if phase == name.strip()), None)
        if phase is None or not backend.strip():
            raise ConfigError(f"{FLAG} takes prefill=NAME,decode=NAME, got {text!r}.")
        found[phase] = backend.strip()
    return found


def check_cpu_backends(text: str) -> None:
    """Raises `ConfigError` for what a CPU does not have."""
    for phase, name in parse_backends(text).items():
        if name not in (AUTO, "torch") and (phase, name) != ("decode", "cpu"):
            raise ConfigError(
                f"{FLAG} {phase}={name} needs a GPU: a CPU has prefill=torch, and decode=cpu or decode=torch."
            )
