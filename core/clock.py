"""The clock of scheduling decisions, which never call `time.*` themselves."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds on a scale that only grows."""

monotonic: Clock = time.monotonic
