from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import compare


def result(name: str, rate: float, **more: object) -> dict[str, object]:
    return {"name": name, "out_tok_s": rate, "tot_tok_s": 10 * rate, "ttft_ms": 5.0, "bad": 0, **more}


def write(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text(json.dumps(rows))
    return path


def test_ratios_and_geometric_mean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = write(tmp_path / "old.json", result("c32", 100.0), result("lat1", 50.0), result("gone", 1.0))
    new = write(
        tmp_path / "new.json", result("c32", 200.0, ttft_ms=2.5), result("lat1", 25.0), result("new", 1.0)
    )
    assert compare.main([str(old), str(new)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["c32", "out_tok_s", "100.00", "200.00", "2.000"] in rows
    assert ["c32", "ttft_ms", "5.00", "2.50", "0.500"] in rows
    assert ["lat1", "out_tok_s", "50.00", "25.00", "0.500"] in rows
    assert rows[-1] == ["geometric", "mean", "of", "2", "1.000"]
    assert not {"gone", "new"} & {row[0] for row in rows}


def test_the_ratio_is_to_the_best_peer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = write(tmp_path / "new.json", result("c32", 300.0), result("prefill", 1.0, headline="tot_tok_s"))
    a = write(tmp_path / "a.json", result("c32", 100.0), result("prefill", 2.0))
    b = write(tmp_path / "b.json", result("c32", 200.0))
    assert compare.main([str(new), str(new), "--peer", f"one={a}", "--peer", str(b)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["scenario", "figure", "one", "b", "new", "new/best", "peer"] in rows
    assert ["c32", "out_tok_s", "100.00", "200.00", "300.00", "1.500"] in rows
    assert ["prefill", "tot_tok_s", "20.00", "-", "10.00", "0.500"] in rows


def test_an_invalid_file_is_one_line_of_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = tmp_path / "odd.json"
    odd.write_text("{}")
    assert compare.main([str(odd), str(odd)]) == 2
    assert "odd.json" in capsys.readouterr().err
