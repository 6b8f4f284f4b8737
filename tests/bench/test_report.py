from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.load import plot, report
from bench.load.pool import Outcome
from bench.load.records import Record
from bench.load.workloads import Workload


def record(index: int, sent: float, times: list[float], end: float, **more: object) -> Record:
    base: dict[str, object] = {
        "out": len(times),
        "prompt": 10,
        "usage": True,
        "cached": 0,
        "finish": "length",
    }
    return Record(index=index, sent=sent, planned=sent, times=times, end=end, **{**base, **more})  # type: ignore[arg-type]


RECORDS = [
    record(0, 100.0, [100.1, 100.2, 100.4], 100.5, cached=5),
    record(1, 100.0, [100.3, 100.6, 100.9], 102.0),
    record(2, 101.0, [101.2], 110.0, bad="truncated", detail="cut"),
]


def test_figures_of_a_run_match_a_manual_calculation() -> None:
    goals = report.parse_goals("ttft:200,tpot:250")
    found = report.summary(Workload(name="w"), Outcome(RECORDS, 0.25, 1), goals, {"seed": 0})
    assert found["wall_s"] == 10.0  # the failed request's time counts, its tokens do not
    assert (found["out_tok_s"], found["tot_tok_s"], found["req_s"]) == (0.6, 2.6, 0.2)
    assert found["goodput_req_s"] == 0.1
    assert (found["ok"], found["bad"]) == (2, 1)
    assert found["failures"] == {"truncated": {"count": 1, "example": "cut"}}
    assert (found["cached_share"], found["events_per_token"]) == (0.25, 1.0)
    assert found["ttft_ms"] == pytest.approx(200.0)
    assert found["tpot_ms"] == pytest.approx((200 + 850) / 2)
    assert found["itl_ms"] == pytest.approx(250.0)
    assert found["percentiles"]["e2e_ms"]["mean"] == pytest.approx(1250.0)
    assert set(json.loads(json.dumps(found))) == set(found)


def test_percentiles_match_numpy_and_are_none_without_values() -> None:
    values = np.random.default_rng(0).exponential(1.0, 999)
    found = report.percentiles(values)
    assert found is not None
    assert list(found) == ["mean", "p50", "p90", "p95", "p99"]
    assert found["p99"] == pytest.approx(np.percentile(values, 99), abs=1e-4)
    assert report.percentiles([]) is None
    assert report.percentiles(float(x) for x in range(101)) == {
        "mean": 50.0, "p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0
    }  # fmt: skip


def test_unreported_cached_tokens_are_none_and_not_zero() -> None:
    silent = [record(0, 0.0, [1.0, 2.0], 2.0, cached=None)]
    found = report.summary(Workload(), Outcome(silent, 0.0, 1), {}, {})
    assert found["cached_share"] is None and "not reported" in report.block(found)


def test_a_run_without_successful_requests_has_a_report() -> None:
    found = report.summary(Workload(), Outcome(RECORDS[2:], 0.0, 1), {}, {})
    assert (found["ok"], found["out_tok_s"], found["ttft_ms"]) == (0, 0.0, None)
    assert "1 x truncated: cut" in report.block(found)
    assert report.summary(Workload(), Outcome([], 0.0, 1), {}, {})["wall_s"] == 0.0


def test_warnings_when_the_client_is_the_bottleneck() -> None:
    late = [record(0, 1.0, [2.0, 3.0], 3.0)]
    late[0].planned = 0.5
    found = report.summary(Workload(), Outcome(late, 0.93, 2, interrupted=True, lost=1), {}, {})
    text = "\n".join(report.warnings(found))
    assert "93%" in text and "500.0 ms late" in text and "interrupted" in text and "died" in text
    assert report.warnings(report.summary(Workload(), Outcome(RECORDS, 0.2, 1), {}, {})) == []


def test_goals_are_parsed_or_rejected() -> None:
    assert report.parse_goals("") == {}
    with pytest.raises(ValueError, match="speed"):
        report.parse_goals("speed:1")


def test_the_table_has_a_line_per_scenario() -> None:
    results = [report.summary(Workload(name=n), Outcome(RECORDS, 0.1, 1), {}, {}) for n in ("one", "two")]
    lines = report.table(results).splitlines()
    assert [line.split()[0] for line in lines] == ["scenario", "one", "two"]


def test_throughput_over_time_adds_up() -> None:
    seconds, rate = plot.throughput(RECORDS[:2], points=8)
    assert sum(rate) * (seconds[1] - seconds[0]) == pytest.approx(6)
    assert plot.throughput([]) == ([], [])


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert plot.draw(tmp_path / "p.png", [("one", RECORDS), ("none", [])], "title")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
