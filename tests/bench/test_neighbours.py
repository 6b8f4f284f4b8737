"""`bench.neighbours`: its figures from fixed records, and a short run with every intruder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import neighbours, results
from bench.chaos.tiny import dummy_model
from bench.load.records import Record
from bench.neighbours import INTRUDERS, LONG, Figures, figures, verdict


def record(*times: float) -> Record:
    return Record(index=0, times=list(times))


def test_only_the_time_in_which_all_streams_run_counts() -> None:
    streams = [record(0.0, 1.0, 2.0, 3.0, 9.0), record(0.5, 1.5, 2.5, 3.5)]
    found = figures(streams, [record(0.9, 1.2), record(2.0, 3.2)])
    # From 0.9 to 3.2: tokens at 1, 2, 3 and at 1.5, 2.5; the gap before each stream's first is not counted.
    assert found.tok_s == pytest.approx((2 + 1) / 2.3)
    assert found.p99_ms == pytest.approx(1000.0)


def test_a_failed_stream_raises() -> None:
    broken = record(0.0, 1.0)
    broken.bad = "http 400"
    with pytest.raises(RuntimeError, match="http 400"):
        figures([record(0.0, 1.0)], [broken])
    with pytest.raises(RuntimeError, match="output-len"):
        figures([record(0.0, 1.0)], [record(2.0, 3.0)])


def test_the_verdict_is_of_the_medians() -> None:
    pairs = [(Figures(100, 10), Figures(share, gap)) for share, gap in ((99, 11), (98, 12), (50, 90))]
    found = verdict(pairs)
    assert (found["slower_share"], found["p99_more_ms"], found["holds"]) == (0.02, 2.0, True)
    assert found["with"] == {"tok_s": 98.0, "p99_ms": 12.0}
    assert not verdict([(Figures(100, 10), Figures(96, 10))])["holds"]
    assert not verdict([(Figures(100, 10), Figures(100, 14))])["holds"]


def test_it_runs_with_every_intruder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(neighbours, "SERVER", ["--device", "cpu", "--load-format", "dummy"])
    model = dummy_model(tmp_path / "model")
    monkeypatch.setattr(neighbours, "WORK_TOKENS", 20)
    sizes = ["--streams", "3", "--rounds", "1", "--input-len", "8", "--output-len", "60"]
    sizes += ["--long", "200", "--short", "40"]
    server = ["--model", str(model), "--kv-tokens", "4096", "--max-running", "8"]
    template = ["--chat-template", str(model / "template.jinja")]
    neighbours.main([*sizes, "--vocab-high", "200", *server, *template])
    found = json.loads((tmp_path / "neighbours.json").read_text())
    assert list(found["intruders"]) == list(INTRUDERS)
    assert all(each["with"]["tok_s"] > 0 for each in found["intruders"].values())
    assert found["short_prompts"]["times"] > 0
    assert list(found["callers"]) == list(LONG)
    assert all(each["speed"] > 0 and each["times"] > 0 for each in found["callers"].values())
