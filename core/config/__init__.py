"""What the operator chose. Frozen groups; flags are made from the fields (`app/cli.py`)."""

from core.config.groups import CacheConfig, Config, ModelConfig, ScheduleConfig, ServeConfig

__all__ = ["CacheConfig", "Config", "ModelConfig", "ScheduleConfig", "ServeConfig"]
