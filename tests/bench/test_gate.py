"""`bench.gate`: its figures from fixed readings, and a short run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import gate, results
from bench.chaos.tiny import dummy_model
from bench.checkpoint import write_checkpoint
from bench.gate import Reading, occupied
from gpu.build import spec_of
from gpu.weights.load import load_model


def test_windows_count_only_with_all_rows_running_and_are_measured_between_steps() -> None:
    readings = [
        Reading(0.0, 0.0, 3),
        Reading(1.0, 0.99, 8),  # not all rows ran at its start
        Reading(2.02, 2.0, 8),  # 1.01 of 1.02
        Reading(3.0, 2.95, 8),  # 0.95 of 0.98
        Reading(3.0, 2.95, 8),  # no step
        Reading(4.0, 3.94, 7),
    ]
    assert occupied(readings, 8) == (0.5, 2)
    assert occupied(readings[:1], 8) == (0.0, 0)


def test_the_gate_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(gate, "PERIOD", 0.05)
    flags = ["--device", "cpu", "--load-format", "dummy", "--max-running", "4"]
    monkeypatch.setattr(gate, "SERVER", flags)
    sizes = ["--clients", "6", "--requests", "60", "--input-len", "8", "--output-len", "32"]
    model = dummy_model(tmp_path / "model")
    pool = ["--vocab-high", "299", "--kv-tokens", "4096", "--dp", "2"]
    arguments = ["--model", str(model), *sizes, *pool]
    monkeypatch.setattr("sys.argv", ["gate", *arguments])
    gate.main()
    found = json.loads((tmp_path / "gate.json").read_text())
    assert found["running"] == 2 * 4 and found["seconds"] > 0
    assert found["ratio"] == pytest.approx(found["out_tok_s"] / found["alone_out_tok_s"], abs=1e-3)


def test_a_written_checkpoint_has_the_dummy_weights(tmp_path: Path) -> None:
    model, cpu = dummy_model(tmp_path / "model"), torch.device("cpu")
    out = tmp_path / "out"
    total = write_checkpoint(model, out, torch.float32, cpu, 100_000)
    assert len(list(out.glob("*.safetensors"))) > 2
    spec = spec_of(out)
    read = load_model(spec, out, torch.float32, cpu).places()
    dummy = load_model(spec, None, torch.float32, cpu).places()
    assert total == sum(place.nbytes for place in dummy.values())
    assert all(torch.equal(read[name], dummy[name]) for name in dummy)
