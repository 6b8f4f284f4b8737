"""`bench.step` without the work of its steps, on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import results
from bench.chaos.tiny import dummy_model
from gpu.step.graphs import Launches


def test_what_a_step_costs_the_host_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench import step  # here: it imports Triton (tests/gpu/kernels/conftest.py)

    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(Launches, "__getitem__", Launches.__getitem__)  # put back behind the test
    model = dummy_model(tmp_path / "model")
    server = ["--model", str(model), "--load-format", "dummy", "--device", "cpu", "--kv-tokens", "4096"]
    sizes = ["--rows", "3", "--context", "16", "--only", "decode3", "--seconds", "0.1"]
    monkeypatch.setattr("sys.argv", ["step", *server, "--tp", "2", *sizes, "--host-only"])
    step.main()
    found = json.loads((tmp_path / "step.json").read_text())
    assert (found["tp"], found["host_only"]) == (2, True)
    plain, loaded = found["cases"]
    assert plain["steps"] > 0 and plain["loaded_us_per_row"] == 0 < loaded["loaded_us_per_row"]
    # Tests of ranks that hang may have left threads in this process, which are counted too.
    assert {"loop", "launch-0", "launch-1", "wait-0", "wait-1"} <= plain["host_us_per_step"].keys()
