"""Typed reads from a config dictionary that somebody else wrote. Every error names the field."""

from __future__ import annotations

import math
from collections.abc import Mapping

from core.errors import ModelError

Config = Mapping[str, object]


class Fields:
    """A config, read field by field. A null field counts as absent, as in transformers."""

    __slots__ = ("_config", "_where")

    def __init__(self, config: Config, where: str = "config.json") -> None:
        self._config = config
        self._where = where

    def wrong(self, name: str, want: str) -> ModelError:
        """The error for a field that is not as it must be."""
        value = self._config.get(name)
        found = "it is missing" if value is None else f"got {value!r}"
        return ModelError(f"{self._where}: {name} must be {want}, {found}.")

    def has(self, name: str) -> bool:
        return self._config.get(name) is not None

    def null(self, name: str) -> bool:
        """Written down as null, which for a few fields is not the same as absent."""
        return name in self._config and self._config[name] is None

    def count(self, name: str, default: int) -> int:
        """A non-negative integer."""
        return 0 if self._config.get(name) == 0 else self.size(name, default)

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer; without a default it must be there."""
        value = self._config.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.wrong(name, "a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive finite number; without a default it must be there."""
        value = self._config.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "a positive number")
        if not (math.isfinite(value) and value > 0):
            raise self.wrong(name, "a positive number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._config.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def ids(self, name: str) -> tuple[int, ...]:
        """One token id or several; none when absent."""
        value = self._config.get(name)
        if value is None:
            return ()
        found: list[int] = []
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, bool) or not isinstance(item, int):
                raise self.wrong(name, "a token id or a list of token ids")
            found.append(item)
        return tuple(item for item in found if item >= 0)

    def group(self, name: str) -> Config:
        """A nested object; empty when absent."""
        value = self._config.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.wrong(name, "an object")
        return value

    def array(self, name: str) -> list[object]:
        """A list; empty when absent."""
        value = self._config.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.wrong(name, "a list")
        return value
