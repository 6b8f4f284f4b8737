from __future__ import annotations

import msgspec
import pytest

from bench.load.workloads import SCENARIOS, TABLE, Workload, named, scaled


def test_the_six_scenarios_are_those_of_the_results() -> None:
    rows = [SCENARIOS[name] for name in TABLE]
    assert [(w.name, w.input_len, w.output_len, w.concurrency, w.requests) for w in rows] == [
        ("lat1", 128, 256, 1, 3),
        ("c32", 1024, 256, 32, 96),
        ("c256", 1024, 256, 256, 768),
        ("prefill", 4096, 8, 32, 128),
        ("shared", 2176, 128, 128, 512),
        ("short512", 64, 64, 512, 2048),
    ]
    assert [w.prefix_len for w in rows] == [0, 0, 0, 0, 2048, 0]
    assert {(w.vocab_low, w.vocab_high, w.temperature, w.ignore_eos) for w in rows} == {
        (1000, 90000, 0.0, True)
    }
    assert [w.name for w in rows if w.headline == "tot_tok_s"] == ["prefill"]


def test_table_stands_for_the_six() -> None:
    assert [w.name for w in named("table, chat256")] == [*TABLE, "chat256"]
    with pytest.raises(ValueError, match="nonsense"):
        named("c32,nonsense")


def test_scale_keeps_lengths_and_never_reaches_zero() -> None:
    small = scaled(SCENARIOS["c256"], 0.1)
    assert (small.concurrency, small.requests, small.input_len) == (26, 77, 1024)
    assert scaled(SCENARIOS["lat1"], 0.01).requests == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"input_len": 10, "prefix_len": 11}, "prefix_len"),
        ({"endpoint": "chat"}, "chat"),
        ({"turns": 2}, "turns"),
        ({"requests": 0}, "requests"),
        ({"vocab_low": 9, "vocab_high": 8}, "vocab"),
        ({"concurrency": 0}, "concurrency"),
        ({"rate": -1.0}, "rate"),
    ],
)
def test_contradictions_are_rejected(change: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        msgspec.structs.replace(Workload(), **change)
