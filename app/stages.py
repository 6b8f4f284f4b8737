"""The stages of a start, for those who watch it: a progress bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from core.clock import monotonic

log = logging.getLogger(__name__)

QUIET_SECONDS = 10.0
"""Seconds between two lines of one stage."""


class Stages:
    """Takes a stage and the share of it that is done, 0 to 1. Called from any thread."""

    seconds_left: float | None = None
    """Seconds left of the stage, at its rate so far; None while it has none."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._stage = ""
        self._began = self._told = 0.0
        self._bar: Any = None

    def __call__(self, stage: str, share: float) -> None:
        with self._lock:
            now = self._clock()
            if stage != self._stage:
                self._close()
                self._stage, self._began, self._told = stage, now, now
                log.info("%s", stage)
            self.seconds_left = (now - self._began) * (1 - share) / share if share > 0 else None
            if 0 < share < 1:
                self._tell(share, now)
            elif share >= 1:
                self._close()

    def _tell(self, share: float, now: float) -> None:
        if sys.stderr.isatty():
            if self._bar is None:
                shape = "{desc}: {percentage:3.0f}%|{bar}| {elapsed} passed, {remaining} left"
                self._bar = tqdm(total=1.0, initial=share, desc=self._stage, bar_format=shape, leave=False)
            self._bar.update(share - self._bar.n)
        elif now - self._told >= QUIET_SECONDS:
            self._told = now
            log.info("%s: %.0f%%, %.0f s left", self._stage, 100 * share, self.seconds_left)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
