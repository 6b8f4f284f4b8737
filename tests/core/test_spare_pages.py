"""Pages that admission leaves free, counted as requests start and advance."""

from __future__ import annotations

import numpy as np

from core.request import Request, SamplingParams
from core.schedule.new_token_ratio import CLIP, NewTokenRatio
from core.schedule.spare_pages import SparePages
from core.schedule.table import SlotTable

PAGE = 16
RATIO = NewTokenRatio(1.0)


def request(prompt: int, output: int) -> Request:
    return Request("r", np.zeros(prompt, np.int32), SamplingParams(max_tokens=output))


def test_the_sum_that_is_kept_is_the_one_added_up_anew() -> None:
    table = SlotTable(8)
    kept = SparePages(table, RATIO, PAGE)
    kept.begin()
    assert kept.pages(request(10, 100)) == 0, "nothing runs: a request that just fits is admitted"

    def start(new: Request, cached: int) -> None:
        table.take(new, cached, 0)
        kept.add(new, cached)

    def advance(of: Request, end: int) -> None:
        before = int(table.least[of.slot])
        table.least[of.slot] = end
        kept.advance(of, before, end)

    short, long, none = request(10, 100), request(40, 3 * CLIP), request(20, 0)
    for step in (
        lambda: start(short, 0),
        lambda: start(long, 16),
        lambda: advance(short, 10),
        lambda: advance(long, 40),
        lambda: start(none, 0),
        lambda: advance(none, 20),
        lambda: advance(long, 2 * CLIP + 100),
        lambda: advance(short, 109),
    ):
        step()
        assert kept.pages(short) == SparePages(table, RATIO, PAGE).pages(short) > 0


def test_what_changes_between_two_steps_is_seen() -> None:
    table = SlotTable(8)
    spare = SparePages(table, RATIO, PAGE)
    running, gone = request(10, 1000), request(10, 1000)
    for each in (running, gone):
        table.take(each, 10, 0)
    spare.begin()
    both, one = spare.pages(running), spare.pages(running, [gone])
    table.release(gone)
    spare.begin()
    assert spare.pages(running) == one < both
