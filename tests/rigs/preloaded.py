"""Imports that forks of `tests.rigs.forked` start with."""

from __future__ import annotations

import os

# Read by OpenMP as torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

import xgrammar  # noqa: F401 - the server imports it as it loads a model: half of the time of its start

import app.commands.generate
import app.server  # noqa: F401
