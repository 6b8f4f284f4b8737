"""Settings of the operator: frozen groups, from whose fields flags are made (`app/cli.py`)."""

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
