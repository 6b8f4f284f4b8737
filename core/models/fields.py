"""Typed reads from a config dictionary that somebody else wrote. Every error names the field."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import takewhile
from typing import Any

from core.errors import ModelError

Config = Mapping[str, object]

_LEAST, _MOST = 1e-38, 1e38
"""Bounds of a number: models compute in float32, and the product of a few has to be finite in float64."""
_NUMBER = "a positive number that float32 can hold"
_MOST_SIZE = 2**63 - 1
_SIZE = "a positive integer of at most 64 bits"


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
        """Return the fields of the object `name`, and the outer ones that the object lacks. The architecture
        is always the outer one, and so is whether the head is the embedding, if the outer config says it:
        transformers ties by that alone."""
        outer = {"architectures", *({"tie_word_embeddings"} if self.has("tie_word_embeddings") else ())}
        group = self.group(name).items()
        own = {key: value for key, value in group if value is not None and key not in outer}
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
        if value > _MOST_SIZE:
            raise self.wrong(name, _SIZE)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive number that float32 can hold. Without a default the field is required."""
        value = self._value(name, int | float, _NUMBER, default)
        if not _LEAST <= value <= _MOST:  # before `float`, which the longest integers overflow
            raise self.wrong(name, _NUMBER)
        return float(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return a list of at least one positive number that float32 can hold."""
        found = self.array(name)
        numbers = [each for each in found if isinstance(each, int | float) and _LEAST <= each <= _MOST]
        if not found or len(numbers) != len(found):
            raise self.wrong(name, "a list of positive numbers that float32 can hold")
        return tuple(map(float, numbers))

    def integers(self, name: str) -> list[int]:
        """Return a list of integers, empty if the field is absent."""
        found = self.array(name)
        integers = [each for each in found if isinstance(each, int) and not isinstance(each, bool)]
        if len(integers) != len(found):
            raise self.wrong(name, "a list of integers")
        return integers

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
    """The number of characters that two names share at the beginning, since the family comes first; then
    their similarity."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    return same, difflib.SequenceMatcher(None, one, other).ratio()
