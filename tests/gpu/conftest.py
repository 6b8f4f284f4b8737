"""What holds for all tests of the device's side."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpu.step import costs


@pytest.fixture(scope="session", autouse=True)
def short_measurements() -> Iterator[None]:
    """Few tests look at what steps cost, and a drafter's engine takes a second to measure it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "SECONDS", 0.0)
        yield
