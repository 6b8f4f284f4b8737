"""New-token ratio: the share of the requested output that is likely to be made."""

from __future__ import annotations

CLIP = 4096
"""Output counted per request at most. SGLang's figure: few answers are longer, and a request that
asks for the whole context would otherwise keep the pool empty."""

START = 0.7
FLOOR = 0.14
DECAY_STEPS = 600
RETRACT_ROOM = 20
"""Tokens of room per row that a retraction assumes. SGLang's figures, all four."""


class NewTokenRatio:
    """Share of the remaining output to reserve pages for.

    Starts careful, falls linearly while steps go well, jumps when a retraction shows that it was too low.
    Owner: event loop.
    """

    def __init__(self, conservativeness: float) -> None:
        self._start = min(START * conservativeness, 1.0)
        self._floor = self._start * FLOOR
        self._decay = (self._start - self._floor) / DECAY_STEPS
        self.value = self._start

    def step(self) -> None:
        """Lower the ratio after a decode step without a preemption."""
        self.value = max(self.value - self._decay, self._floor)

    def retracted(self, made: int, asked: int, rows: int) -> None:
        """Raise the ratio after a preemption: the `rows` requests that still run have generated `made` of
        their `asked` tokens."""
        self.value = min(1.0, (made + RETRACT_ROOM * rows) / (asked + 1))

    def idle(self) -> None:
        """Return to the initial ratio, since nothing runs."""
        self.value = self._start
