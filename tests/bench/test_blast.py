from __future__ import annotations

from bench.load import blast


def test_no_event_is_missed_at_full_speed() -> None:
    assert blast.parse(1_000).events == 1_000
    rate = blast.receive(connections=4, out=250)
    assert rate.events == 1_000 and rate.wall > 0 and rate.cpu > 0
