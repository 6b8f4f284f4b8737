"""`bench.predict`: its closed loop runs all requests, with plausible latencies."""

from __future__ import annotations

from bench.load.workloads import Workload
from bench.predict import MODELS, ClosedLoop, Device, interpolated
from core.config import ScheduleConfig

WORK = Workload(input_len=96, output_len=8, concurrency=4, requests=10)


def loop(work: Workload = WORK, **config: int) -> ClosedLoop:
    closed_loop = ClosedLoop(work, Device(MODELS["qwen3-8b"]), ScheduleConfig(step_tokens=8192, **config))
    closed_loop.run()
    return closed_loop


def test_every_request_gets_all_its_tokens() -> None:
    ran = loop()
    assert ran.tokens == 80
    assert (len(ran.ttfts), len(ran.gaps)) == (10, 70)
    assert min(ran.ttfts) > 0 and min(ran.gaps) > 0


def test_one_client_waits_for_steps_of_one_row() -> None:
    ran = loop(Workload(input_len=96, output_len=100, concurrency=1, requests=1))
    times = MODELS["qwen3-8b"]
    least = 1e-6 * (times.layers * times.products[1] + times.head[1])
    assert all(least < gap < 1.3 * least for gap in ran.gaps)


def test_chunks_that_fit_a_target_shorten_the_longest_gap() -> None:
    work = Workload(input_len=1_000, output_len=40, concurrency=16, requests=48)
    assert max(loop(work).gaps) > 0.15
    assert max(loop(work, itl_target=50).gaps) < 0.05


def test_a_table_is_interpolated_and_extrapolated() -> None:
    table = {1: 10.0, 3: 30.0}
    assert [interpolated(table, rows) for rows in (1, 2, 6)] == [10.0, 20.0, 60.0]
