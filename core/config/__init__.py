"""What the operator chose. Frozen groups; flags are made from the fields (`app/cli.py`)."""

from core.config.groups import PARSERS, CacheConfig, Config, ModelConfig, ScheduleConfig, ServeConfig

__all__ = ["PARSERS", "CacheConfig", "Config", "ModelConfig", "ScheduleConfig", "ServeConfig"]
