"""A row of the table: a claim, what tries to break it, and a fault that must be noticed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from bench.chaos.bench import Bench

Device = Literal["tiny", "counting"]
"""tiny: a random model of two layers on the CPU runner, or what `--model` names; counting: no model, tokens
that prove which pages were read."""


@dataclass(frozen=True)
class Setting:
    """How the server of a row is started. Rows of one setting share a server."""

    device: Device = "tiny"
    flags: tuple[str, ...] = ()


@dataclass
class Found:
    """What a row saw: figures to print, and everything that contradicts the claim."""

    figures: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def expect(self, holds: bool, otherwise: str) -> None:
        """Note `otherwise` unless it `holds`."""
        if not holds:
            self.wrong.append(otherwise)


@dataclass(frozen=True)
class Row:
    """`run` does what the row is about; the bench checks the books before and after."""

    name: str
    claim: str
    run: Callable[[Bench], Awaitable[Found]]
    seed: str
    """The fault of `bench.chaos.faults` that `--break` puts into the server."""
    setting: Setting = Setting()
