"""How long a test waits for what must come."""

from __future__ import annotations

PATIENCE = 120.0
"""Seconds. A bound for a failing test and never a promise: on a busy machine torch alone takes ten of them to
import, and a bound of 20 has failed a test in which nothing was wrong."""
