"""What holds for all tests."""

from __future__ import annotations

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    # Side by side: torch would take all cores for each worker, and for each server that it starts.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
