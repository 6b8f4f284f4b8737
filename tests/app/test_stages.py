"""Stages of a start, as those who watch it see them, and how long the present one still takes."""

from __future__ import annotations

import io
import sys

import pytest

from app.stages import Stages


class Clock:
    """Time that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_the_estimate_is_by_the_rate_so_far() -> None:
    clock = Clock()
    stages = Stages(clock)
    stages("weights", 0.0)
    assert stages.seconds_left is None
    clock.now = 30.0
    stages("weights", 0.25)
    assert stages.seconds_left == 90.0
    stages("graphs", 0.0)
    assert stages.seconds_left is None


def test_elsewhere_than_on_a_terminal_stages_are_plain_lines(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    stages = Stages(clock)
    with caplog.at_level("INFO"):
        for share in range(100):
            stages("weights", share / 100)
            clock.now += 0.5
        stages("graphs", 0.0)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "weights",
        "weights: 20%, 40 s left",
        "weights: 40%, 30 s left",
        "weights: 60%, 20 s left",
        "weights: 80%, 10 s left",
        "graphs",
    ]


def test_on_a_terminal_there_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    stages = Stages(Clock())
    stages("weights", 0.5)
    stages("weights", 1.0)
    assert "weights:  50%|" in terminal.getvalue()
