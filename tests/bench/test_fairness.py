"""`bench.fairness`: a short run with two keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import fairness, results
from bench.chaos.tiny import dummy_model, flags


def test_it_runs_alone_and_beside_long_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(fairness, "SERVER", [])
    sizes = ["--long", "200", "--input-len", "20", "--output-len", "4", "--requests", "3", "--gap", "0"]
    model = flags(dummy_model(tmp_path / "model"))
    fairness.main([*sizes, "--settle", "0.2", "--vocab-high", "299", "--at-once", "2", *model])
    (run,) = json.loads((tmp_path / "fairness.json").read_text())["runs"]
    assert run["long_prompts"] > 0
    assert run["times"] == pytest.approx(run["beside_ms"] / (sum(run["alone_ms"]) / 2), rel=0.05)
    assert run["holds"] == (run["times"] <= fairness.LIMIT)


def test_a_server_that_does_not_start_is_told_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log is gone with the folder of the run."""
    monkeypatch.setattr(fairness, "SERVER", [])
    with pytest.raises(RuntimeError, match="there is no 'nowhere/at/all'"):
        fairness.main(["--model", "nowhere/at/all"])
