"""What forks of `tests.rigs.forked` find imported."""

from __future__ import annotations

import os

# Read by OpenMP as torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

import app.generate
import app.server  # noqa: F401
