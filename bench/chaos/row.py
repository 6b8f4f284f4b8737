"""A row of the table: a claim, an attack on it, and a fault that the row must detect."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from bench.chaos.bench import Bench

Device = Literal["tiny", "counting"]
"""tiny: a random model of two layers on the CPU, or the one of `--model`; counting: no model, tokens that
depend on the pages that were read."""


@dataclass(frozen=True)
class Setting:
    """Start-up settings of a row's server. Rows with equal settings share a server."""

    device: Device = "tiny"
    flags: tuple[str, ...] = ()


@dataclass
class Outcome:
    """Results of a row: figures to print, and violations of its claim."""

    figures: dict[str, Any] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    def expect(self, condition: bool, violation: str) -> None:
        """Record `violation` unless `condition` holds."""
        if not condition:
            self.violations.append(violation)


@dataclass(frozen=True)
class Row:
    """`run` is the attack; the bench checks the accounting before and after."""

    name: str
    claim: str
    run: Callable[[Bench], Awaitable[Outcome]]
    fault: str
    """The fault of `bench.chaos.faults` that `--break` injects."""
    setting: Setting = Setting()
