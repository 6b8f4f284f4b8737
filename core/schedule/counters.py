"""Counters of the scheduler."""

from __future__ import annotations


class Counters:
    """Totals since the start. Owner: event loop."""

    def __init__(self) -> None:
        self.steps = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.retractions = 0
