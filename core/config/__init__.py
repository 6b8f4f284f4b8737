"""What the operator chose. Frozen groups; flags are made from the fields (`app/cli.py`)."""

from core.config.groups import (
    LEAST_STEP,
    PARSERS,
    CacheConfig,
    Config,
    ModelConfig,
    ScheduleConfig,
    ServeConfig,
)

__all__ = ["LEAST_STEP", "PARSERS", "CacheConfig", "Config", "ModelConfig", "ScheduleConfig", "ServeConfig"]
