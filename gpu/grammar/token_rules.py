"""Allowed token ids and banned token sequences, alone or on top of a grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from core.grammar import CompiledGrammar, TokenRules
from gpu.grammar.stepper import Bits, Matcher, reached


class _BannedSequence(NamedTuple):
    """Tokens before the last, and where the last one's bit is."""

    before: list[int]
    word: int
    bit: np.int32


class _State:
    """One request's recent tokens, and its grammar's matcher if it has one. Owner: launch thread."""

    __slots__ = ("inner", "recent", "table")

    def __init__(self, table: RestrictedGrammar, inner: Matcher | None) -> None:
        self.table = table
        self.inner = inner
        self.recent: list[int] = []


class RestrictedGrammar:
    """A compiled grammar (or none) under rules: `core.grammar.CompiledGrammar`. Immutable."""

    __slots__ = ("_grammar", "_stepper", "allowed", "reach", "sequences")

    def __init__(self, stepper: TokenRuleStepper, grammar: CompiledGrammar | None, rules: TokenRules) -> None:
        self._stepper = stepper
        self._grammar = grammar
        self.allowed = _allowed(rules, stepper.width)
        """int32 [words]: the mask where no banned sequence is about to be complete."""
        longer = [ids for ids in rules.banned if len(ids) > 1]
        self.sequences = [_BannedSequence(list(ids[:-1]), ids[-1] // 32, _bit(ids[-1])) for ids in longer]
        self.reach = max((len(ids) - 1 for ids in longer), default=0)
        """Tokens to remember: the longest banned sequence without its last."""

    def restrict(self, bits: Bits, row: int, recent: list[int]) -> None:
        """Forbid in a row of masks what the rules do behind `recent` tokens."""
        bits[row] &= self.allowed
        for before, word, bit in self.sequences:
            if recent[-len(before) :] == before:
                bits[row, word] &= ~bit

    def allows_nothing(self) -> bool:
        """Whether no token can be the first: the rules contradict the grammar, or each other."""
        if self._grammar is None or not self.allowed.any():
            return not self.allowed.any()
        bits, first = np.empty((1, len(self.allowed)), np.int32), self.matcher()
        first.stepper.fill([first.state], [0], bits)
        return not bits.any()

    @property
    def warnings(self) -> tuple[str, ...]:
        """See `CompiledGrammar.warnings`."""
        return () if self._grammar is None else self._grammar.warnings

    def matcher(self) -> Matcher:
        """See `CompiledGrammar.matcher`."""
        inner = None if self._grammar is None else self._grammar.matcher()
        return Matcher(self._stepper, _State(self, inner))


class TokenRuleStepper:
    """`Stepper` for rules. A row costs some 5 µs, and 0.2 for each sequence. Owner: launch thread."""

    __slots__ = ("width", "words")

    def __init__(self, width: int) -> None:
        """`width`: number of logits."""
        self.width = width
        self.words = -(-width // 32)

    def fill(self, states: Sequence[_State], rows: Sequence[int], bits: Bits) -> None:
        """See `Stepper.fill`. Allows what both the grammar and the rules allow."""
        for state, row in zip(states, rows, strict=True):
            if state.inner is None:
                bits[row] = -1
            else:
                state.inner.stepper.fill([state.inner.state], [row], bits)
            state.table.restrict(bits, row, state.recent)

    def fill_ahead(
        self, states: Sequence[_State], rows: Sequence[int], bits: Bits, ahead: Sequence[Sequence[int]]
    ) -> list[int]:
        """See `Stepper.fill_ahead`."""
        counts = []
        for state, row, tokens in zip(states, rows, ahead, strict=True):
            if state.inner is None:
                masks = 1 + len(tokens)
                bits[row : row + masks] = -1
            else:
                (masks,) = state.inner.stepper.fill_ahead([state.inner.state], [row], bits, [tokens])
            for behind in range(masks):
                state.table.restrict(bits, row + behind, [*state.recent, *tokens[:behind]])
            counts.append(reached(bits, row, tokens[: masks - 1]))
        return counts

    def lost(self, state: _State) -> bool:
        """See `Stepper.lost`."""
        return state.inner is not None and state.inner.stepper.lost(state.inner.state)

    def accept(self, states: Sequence[_State], tokens: Sequence[int]) -> list[str | None]:
        """See `Stepper.accept`."""
        return [self._accept(state, token) for state, token in zip(states, tokens, strict=True)]

    def _accept(self, state: _State, token: int) -> str | None:
        state.recent.append(token)
        del state.recent[: -state.table.reach or len(state.recent)]
        if state.inner is None:
            return None
        (reason,) = state.inner.stepper.accept([state.inner.state], [token])
        if reason is not None and state.inner.grammar is not None:
            state.inner.grammar.broken = True
        return reason

    def ended(self, state: Any, token: int) -> bool:
        """See `Stepper.ended`. Rules alone never end a text."""
        inner = state.inner
        return inner is not None and bool(inner.stepper.ended(inner.state, token))


def _bit(token: int) -> np.int32:
    return np.uint32(1 << token % 32).view(np.int32)


def _allowed(rules: TokenRules, width: int) -> NDArray[np.int32]:
    flags = np.zeros(-(-width // 32) * 32, np.bool_)
    if rules.allowed is None:
        flags[:width] = True
    else:
        flags[list(rules.allowed)] = True
    flags[[ids[0] for ids in rules.banned if len(ids) == 1]] = False
    return np.packbits(flags, bitorder="little").view(np.int32)
