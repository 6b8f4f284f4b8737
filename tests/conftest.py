"""What holds for all tests."""

from __future__ import annotations

import functools
import gc
import os
import ssl
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("tests.rigs")

settings.register_profile("search", settings.get_profile("default"))
settings.register_profile("repeatable", derandomize=True, database=None)
# The same examples on every run: a new example must not fail a change that has nothing to do with it.
# `pytest --hypothesis-profile search` looks for new ones.
settings.load_profile("repeatable")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Side by side: torch would take all cores for each worker, and for each server that it starts.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

_create_context = ssl.create_default_context
_default_context = functools.cache(ssl.create_default_context)


def _shared_context(*arguments: Any, **named: Any) -> ssl.SSLContext:
    """Client libraries make a context for each client, and each reads all certificates again: 10 ms of a test
    that needs none of them."""
    return _create_context(*arguments, **named) if arguments or named else _default_context()


ssl.create_default_context = _shared_context

# What is imported and collected stays: the garbage collector need not walk it again and again.
gc.disable()


@pytest.hookimpl(optionalhook=True, wrapper=True)
def pytest_xdist_auto_num_workers() -> Generator[None, int, int]:
    """One more than xdist counts cores: what waits for a server or a time-out leaves its core to others."""
    return (yield) + 1


def pytest_collection_finish() -> None:
    gc.freeze()
    # Seldom: tests make many objects that live for a moment. 4% of the CPU time of kernel tests.
    gc.set_threshold(50_000, 20, 100)
    gc.enable()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is not None and nextitem.path != item.path:
        gc.freeze()  # again: the housekeeping of an engine that ends makes all collectable


def pytest_configure(config: pytest.Config) -> None:
    # Bindings report what is still frozen at the end as leaked. Added before pytest's own, so that it comes
    # behind the five collections in which pytest looks for exceptions that nobody has seen: of all that is
    # there they would take two seconds.
    config.add_cleanup(gc.unfreeze)
