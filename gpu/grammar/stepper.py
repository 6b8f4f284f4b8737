"""The interface between the launch thread and the matchers of a grammar library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.int32]
"""Masks [rows, words]: bit t % 32 of word t // 32 says whether token t may follow."""


class Stepper(Protocol):
    """Moves many matchers of one library with one native call, the GIL released meanwhile.

    Owner: launch thread.
    """

    @property
    def words(self) -> int:
        """Words in a mask row."""
        ...

    def fill(self, states: Sequence[Any], rows: Sequence[int], bits: Bits) -> None:
        """Write the mask of `states[i]` into `bits[rows[i]]`. A state that fails leaves its row empty, or
        fails at the next `accept`."""
        ...

    def fill_ahead(
        self, states: Sequence[Any], rows: Sequence[int], bits: Bits, ahead: Sequence[Sequence[int]]
    ) -> list[int]:
        """Write the mask of `states[i]` into `bits[rows[i]]`, and into the rows behind it those after each of
        the tokens `ahead[i]`, up to the first that its mask forbids or that ends the text. States stay where
        they are. Returns how many masks each has."""
        ...

    def lost(self, state: Any) -> bool:
        """Whether the state failed, in `fill_ahead` perhaps behind tokens that will not come: only a new
        state can tell."""
        ...

    def accept(self, states: Sequence[Any], tokens: Sequence[int]) -> list[str | None]:
        """Advance each state by its token. Per state None, or the reason it cannot advance."""
        ...

    def ended(self, state: Any, token: int) -> bool:
        """Whether the accepted `token` ended the text: nothing may follow, and no mask is needed."""
        ...


def reached(bits: Bits, row: int, ahead: Sequence[int]) -> int:
    """Masks from `bits[row]` on that can matter: one, and one behind each token that the mask before it
    allows."""
    masks = 1
    for at, token in enumerate(ahead, row):
        if not bits.item(at, token >> 5) >> (token & 31) & 1:
            break
        masks += 1
    return masks


class Matcher(NamedTuple):
    """One request's place in its grammar."""

    stepper: Stepper
    state: Any
    grammar: Grammar | None = None
    """The grammar it is of, marked broken when the matcher breaks."""


class Grammar:
    """A compiled grammar: `core.grammar.CompiledGrammar`. Immutable but for `broken`.

    `fork` makes a fresh state and may run on any thread; `size` is what the grammar holds, in bytes;
    `warnings` name the parts of the constraint that it does not enforce.
    """

    __slots__ = ("_fork", "_stepper", "broken", "size", "warnings")

    def __init__(self, stepper: Stepper, fork: Any, size: int, warnings: tuple[str, ...] = ()) -> None:
        self._stepper = stepper
        self._fork = fork
        self.size = size
        self.warnings = warnings
        self.broken = False
        """A matcher of it broke. llguidance's share a lexer that stays broken when it passes a limit, so
        no later request may be given one: the grammar is compiled again."""

    def matcher(self) -> Matcher:
        """A fresh matcher, 10 µs."""
        return Matcher(self._stepper, self._fork(), self)
