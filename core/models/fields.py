"""Typed reads from a config dictionary that somebody else wrote. Every error names the field."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import takewhile
from typing import Any

from core.errors import ModelError

Config = Mapping[str, object]


class Fields:
    """A config, read field by field. A null field counts as absent, as in transformers."""

    def __init__(self, config: Config, where: str = "config.json") -> None:
        self._config = config
        self._where = where

    def over(self, defaults: Config) -> Fields:
        """These fields, and those of `defaults` that are not among them."""
        return Fields({**defaults, **self._config}, self._where)

    def without(self, *names: str) -> Config:
        """The config less these fields."""
        return {key: value for key, value in self._config.items() if key not in names}

    def inside(self, name: str) -> Fields:
        """Those of the object `name` and, where it does not have them, those beside it."""
        own = {key: value for key, value in self.group(name).items() if value is not None}
        return Fields({**self._config, **own}, f"{self._where}: {name}")

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

    def _value(self, name: str, kind: Any, want: str, default: Any) -> Any:
        """The field, which must be of `kind`, or the default; without one it must be there."""
        value = self._config.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.wrong(name, want)
        return value

    def count(self, name: str, default: int) -> int:
        """A non-negative integer."""
        return 0 if self._config.get(name) == 0 else self.size(name, default)

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer; without a default it must be there."""
        value: int = self._value(name, int, "a positive integer", default)
        if value <= 0 and value != default:  # `count` has 0 as a default
            raise self.wrong(name, "a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive finite number; without a default it must be there."""
        value = float(self._value(name, int | float, "a positive number", default))
        if not (math.isfinite(value) and value > 0):
            raise self.wrong(name, "a positive number")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self._value(name, bool, "true or false", default))

    def text(self, name: str, default: str) -> str:
        return str(self._value(name, str, "a string", default))

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
        found: Config = self._value(name, Mapping, "an object", {})
        return found

    def array(self, name: str) -> list[object]:
        """A list; empty when absent."""
        return list(self._value(name, list, "a list", []))


def nearest(name: str, served: Iterable[str]) -> str:
    """Return the served name that is most similar to `name`."""
    return max(sorted(served), key=partial(_likeness, name))


def _likeness(one: str, other: str) -> tuple[int, float]:
    """With how many equal characters two names begin, since the family comes first; then their similarity."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    return same, difflib.SequenceMatcher(None, one, other).ratio()
