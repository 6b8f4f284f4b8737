"""What `/health` tells, kept up to date from the first second."""

from __future__ import annotations

from enum import Enum

import msgspec


class Phase(Enum):
    """A server's life. Only READY takes requests."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Health(msgspec.Struct, frozen=True):
    """`stage` and `progress` (0 to 1) say how far the start is; `reason` why it is not ready."""

    phase: Phase = Phase.STARTING
    stage: str = "starting"
    progress: float = 0.0
    reason: str | None = None
