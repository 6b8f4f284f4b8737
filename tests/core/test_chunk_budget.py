"""Sizes of prompt chunks in steps with decode rows, by `--itl-target` and `--prefill-weight`."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from core.config import ScheduleConfig
from core.costs import ChunkCosts, CostTable
from core.executor import Capabilities
from core.plan import StepPlan
from core.request import Request
from core.schedule import chunk_budget
from core.schedule.builder import PlanBuilder
from core.schedule.chunk_budget import BESIDE, SEVERAL, ChunkBudget
from core.schedule.speculation import NO_DRAFTS
from tests.rigs.scheduler import Harness

STEP, LEAST = 400, 8
SIZES = tuple(range(16, 401, 16))
COSTS = ChunkCosts(CostTable(SIZES, tuple(1e-3 + 1e-4 * size for size in SIZES)), 0.0)
"""A step takes 1 ms and 0.1 ms a token."""
DEEP = ChunkCosts(COSTS.step, 1e-7)
"""The same, and a tenth of a microsecond for each query and key."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_budget, "LEAST_CHUNK", LEAST)


def harness(target: float = 11.0, costs: ChunkCosts | None = COSTS, rows: int = 8, **more: Any) -> Harness:
    return Harness(pages=5_000, rows=rows, step_tokens=STEP, chunk_costs=costs, itl_target=target, **more)


def paying(weight: float, seconds: float = 1e-3, token_seconds: float = 1e-3, **more: Any) -> Harness:
    """Prompts pay by the seconds that steps take: `seconds` each, and `token_seconds` for each token of a
    prompt. No cost was measured."""
    h = harness(0.0, None, prefill_weight=weight, **more)
    h.executor.seconds, h.executor.token_seconds = seconds, token_seconds
    return h


def decoding(h: Harness, rows: int = 1, max_tokens: int = 200) -> None:
    """Let `rows` rows decode, their prompts behind them."""
    for row in range(rows):
        h.request([row + 1] * 4, max_tokens)
    for _ in range(3):
        h.turn()


def answered(h: Harness, request: Request) -> None:
    """Turn until the request has its first token."""
    while not h.delivered[request.id]:
        h.turn()


def plans(h: Harness) -> list[StepPlan]:
    """Turn until all is over; the plans from the first with prompts to the last."""
    before = len(h.executor.plans)
    h.run()
    found = h.executor.plans[before:]
    with_prompts = [at for at, plan in enumerate(found) if plan.chunks]
    return found[with_prompts[0] : with_prompts[-1] + 1]


def test_chunks_beside_rows_are_the_largest_that_fit() -> None:
    h = harness()
    decoding(h)
    long = h.request(range(1, 601), 4)
    sizes = [plan.num_tokens for plan in plans(h)]
    assert sizes[0] == 93, "12 ms would be 112 tokens, 10.6 are 96: 92 in whole pages of 4 beside a row"
    assert max(sizes) <= 96
    h.check(long)


def test_chunks_beside_rows_have_the_size_of_most_tokens_a_second() -> None:
    """Products take whole waves of tiles: 400 tokens fit into the target, and take a wave more than 384."""
    waves = tuple(1e-3 + 0.016 * -(-size // 128) for size in SIZES)
    h = harness(80.0, ChunkCosts(CostTable(SIZES, waves), 0.0))
    decoding(h)
    h.request(range(1, 1201), 4)
    assert plans(h)[0].num_tokens == 381, "380 in whole pages of 4, beside a row"


def test_a_larger_chunk_is_preferred_to_one_with_1_percent_more_throughput() -> None:
    """Measured costs are off by more than 1%, and every step has a fixed cost."""
    costs = tuple(1e-3 * size * (0.99 if size == 128 else 1.0) for size in SIZES)
    h = harness(300.0, ChunkCosts(CostTable(SIZES, costs), 0.0))
    decoding(h)
    h.request(range(1, 1201), 4)
    assert plans(h)[0].num_tokens > 256


def test_prompts_alone_fill_their_steps() -> None:
    h = harness()
    h.request(range(1, 601), 4)
    assert [plan.num_tokens for plan in plans(h)] == [STEP, 200]


@pytest.mark.parametrize(("target", "costs"), [(0.0, COSTS), (11.0, None)], ids=["no target", "not measured"])
def test_without_a_target_or_costs_rows_change_nothing(target: float, costs: ChunkCosts | None) -> None:
    h = harness(target, costs)
    decoding(h)
    h.request(range(1, 401), 4)
    assert max(plan.num_tokens for plan in plans(h)) == STEP - 3, "whole pages beside a row"


def test_prompts_go_on_where_rows_alone_take_too_long() -> None:
    h = harness(target=1.0)
    decoding(h)
    long = h.request(range(1, 101), 4)
    chunks = [len(chunk.tokens) for plan in plans(h) for chunk in plan.chunks]
    assert max(chunks) == LEAST
    h.check(long)


def test_chunks_far_behind_the_beginning_of_a_prompt_are_smaller() -> None:
    h = harness(costs=DEEP)
    decoding(h)
    h.request(range(1, 1201), 4)
    sizes = [plan.num_tokens for plan in plans(h) if plan.chunks]
    assert sizes[0] > sizes[len(sizes) // 2] > sizes[-2] >= LEAST
    assert all(later <= earlier for earlier, later in pairwise(sizes))


@pytest.mark.parametrize("weight", [0.5, 4.0])
def test_prompts_take_their_share_of_the_time(weight: float) -> None:
    """Beside more rows than prompts there are steps without chunks."""
    h = harness(prefill_weight=weight)
    decoding(h, rows=4, max_tokens=250)
    h.request(range(1, 501), 1)
    found = plans(h)
    whole = sum(1e-3 + 1e-4 * max(-(-plan.num_tokens // 16) * 16, 16) for plan in found)
    extra = whole - len(found) * (1e-3 + 1e-4 * 16)
    share = weight / (weight + 4)
    assert share * whole - 0.011 < extra < share * whole + 0.011
    assert any(not plan.chunks for plan in found)


def test_one_prompt_beside_one_row_hardly_pauses() -> None:
    h = harness()
    decoding(h)
    h.request(range(1, 1_001), 1)
    found = plans(h)
    assert sum(not plan.chunks for plan in found) < len(found) / 8


@pytest.mark.parametrize("weight", [0.5, 4.0])
def test_prompts_take_their_share_by_the_seconds_that_steps_took(weight: float) -> None:
    h = paying(weight, 1e-3, 1e-4)
    decoding(h, rows=4, max_tokens=2_500)
    h.request(range(1, 2_001), 1)
    found = plans(h)
    prompt = [sum(len(chunk.tokens) for chunk in plan.chunks) for plan in found]
    whole = sum(1e-3 + 1e-4 * tokens for tokens in prompt)
    share = weight / (weight + 4)
    assert 1e-4 * sum(prompt) == pytest.approx(share * whole, abs=0.021), "to a step of 200 tokens"
    assert max(prompt) == STEP // 2 - 4, "seconds limit no size, but the prompt is longer than a step"


@pytest.mark.parametrize(("weight", "seconds"), [(0.0, 1e-3), (0.5, 0.0)], ids=["no weight", "no clock"])
def test_without_a_weight_or_seconds_prompts_never_pause(weight: float, seconds: float) -> None:
    h = paying(weight, seconds, 0.1 * seconds)
    decoding(h, rows=4)
    h.request(range(1, 4_001), 1)
    assert all(plan.chunks for plan in plans(h))


@pytest.mark.parametrize(("weight", "most"), [(0.5, 52), (2.5, 52), (16.0, STEP // 2)])
def test_prompts_with_a_small_share_take_short_steps(weight: float, most: int) -> None:
    """A prompt token takes 1 ms: 50 of them are as long as a step may be. Known from the first step on."""
    h = paying(weight)
    decoding(h, rows=4, max_tokens=4_000)
    h.request(range(1, 601), 4)
    before = len(h.executor.plans)
    for _ in range(700):
        h.turn()
    prompt = [plan.num_tokens - len(plan.decode_slots) for plan in h.executor.plans[before:]]
    assert most - 8 < max(prompt) <= most


def beside_a_long_prompt(short: int, turns: int, at_once: int = 1) -> tuple[Harness, Request, list[int]]:
    """Four rows and a prompt of 2,000 tokens of 1 ms; after its first chunk prompts of `short` tokens come,
    the next when one has its token. Returns the turns that each of them waited."""
    h = paying(1.0)
    decoding(h, rows=4, max_tokens=4_000)
    long = h.request(range(1, 2_001), 1)
    h.turn()
    h.turn()
    sent = [(h.request([60 + i] * short, 1), 0) for i in range(at_once)]
    waited = []
    for turn in range(1, turns):
        h.turn()
        for at, (request, since) in enumerate(sent):
            if h.delivered[request.id]:
                waited.append(turn - since)
                h.check(request)
                sent[at] = h.request([turn % 90, 7, at] * (short // 3), 1), turn
    return h, long, waited


def test_short_prompts_do_not_wait_for_the_debt_of_a_long_one() -> None:
    """The debt of a chunk of 50 ms is paid after 250 steps of 1 ms. A short prompt has its first token
    within three steps."""
    _, _, waited = beside_a_long_prompt(6, 200)
    assert waited[0] <= 3


def test_short_prompts_do_not_wait_for_what_a_long_one_left() -> None:
    """The long prompt has its token and no prompt is under way. Short ones wait in front of the next long
    one, or behind it."""
    for behind in (False, True):
        h = paying(1.0)
        decoding(h, rows=4, max_tokens=4_000)
        long = h.request(range(1, 101), 1)
        answered(h, long)
        if behind:
            h.request(range(101, 301), 1)
        short = h.request([60] * 6, 1)
        if not behind:
            h.request(range(101, 301), 1)
        for _ in range(4):
            h.turn()
        assert h.delivered[short.id]


def test_a_long_prompt_that_waits_keeps_a_slot_from_short_ones() -> None:
    """The long prompt waits until another prompt's debt is paid. Meanwhile later short requests, which decode
    3,000 tokens, must not take the last slot."""
    h = paying(1.0, rows=6)
    decoding(h, rows=4, max_tokens=4_000)
    first = h.request(range(1, 101), 1)
    answered(h, first)
    long = h.request(range(101, 301), 1)
    short = [h.request([60 + at] * 6, 3_000) for at in range(2)]
    answered(h, long)
    assert [bool(h.delivered[each.id]) for each in short] == [True, False]


@pytest.mark.parametrize(("tokens", "at_once"), [(300, False), (6, True)])
def test_nothing_is_preempted_for_a_prompt_that_pauses(tokens: int, at_once: bool) -> None:
    """The debt of a long prompt is paid first, by all rows; a short prompt does not wait for that."""
    h = paying(1.0, rows=5, order="priority", preemption_gap=5)
    decoding(h, rows=4, max_tokens=4_000)
    answered(h, h.request(range(1, 101), 4_000))
    h.turn()
    before = len(h.executor.plans)
    urgent = h.request(range(101, 101 + tokens), 1, priority=10)
    answered(h, urgent)
    h.check(urgent)
    found = h.executor.plans[before:]
    left = next(at for at, plan in enumerate(found) if len(plan.decode_slots) < 5)
    begun = next(at for at, plan in enumerate(found) if plan.chunks)
    assert begun - left <= 2
    assert (left <= 2) == at_once


def test_a_row_alone_is_preempted_for_a_prompt_that_pauses() -> None:
    """No row is left that it could slow."""
    h = paying(0.01, rows=1, order="priority", preemption_gap=5)
    h.request(range(1, 101), 400)
    for _ in range(6):
        h.turn()
    before = len(h.executor.plans)
    urgent = h.request(range(101, 301), 1, priority=10)
    answered(h, urgent)
    assert len(h.executor.plans) - before <= 6


def test_the_end_of_a_long_prompt_pauses_too() -> None:
    """The last tokens of a long prompt would fit the account of short prompts."""
    h = paying(1.0)
    decoding(h, rows=4, max_tokens=4_000)
    before = len(h.executor.plans)
    long = h.request(range(1, 91), 1)
    answered(h, long)
    chunks = [at for at, plan in enumerate(h.executor.plans[before:]) if plan.chunks]
    assert len(chunks) == 2 and chunks[1] - chunks[0] > 100


def test_short_prompts_have_half_of_what_a_long_one_pays_back() -> None:
    """The long prompt goes on and the rows keep the rest of the time, however many short ones come."""
    h, long, waited = beside_a_long_prompt(30, 1_500, at_once=4)
    chunks = [chunk for plan in h.executor.plans for chunk in plan.chunks]
    tokens = 1e-3 * sum(len(chunk.tokens) for chunk in chunks)
    whole = sum(1e-3 + 1e-3 * sum(len(chunk.tokens) for chunk in plan.chunks) for plan in h.executor.plans)
    progress = max(chunk.start for chunk in chunks if len(chunk.tokens) > 40)
    assert len(waited) > 5 and progress >= 200
    share = 5 / (5 + 4)  # of five prompts with a weight of 1 beside four rows
    assert tokens < (share + 0.1) * whole
    assert not h.delivered[long.id]


def test_prompts_go_on_where_no_row_decoded_alone_before() -> None:
    """The seconds of a step without chunks are not known then, nor what it would pay in."""
    h = paying(0.5, 1e-3, 1e-4)
    requests = [h.request([first] * 300, 40) for first in range(1, 9)]
    h.run()
    for request in requests:
        h.check(request)


def test_a_caller_that_sends_one_prompt_after_the_other_pays_for_each() -> None:
    """Between two prompts of the caller no prompt waits, but the debt of the previous one is still paid."""
    h = paying(4.0, 1e-3, 1e-4)
    decoding(h, rows=4, max_tokens=3_000)
    prompts, before = 5, len(h.executor.plans)
    for number in range(prompts):
        long = h.request(range(1000 * number, 1000 * number + 380), 1)
        answered(h, long)
    steps = len(h.executor.plans) - before
    share = prompts * 0.038 / (prompts * 0.038 + steps * 1e-3)
    assert share < 0.6, "half of the time, and the last prompt has not paid yet"


def test_an_accident_does_not_stop_prompts_for_long() -> None:
    """One step that took a minute counts as four times the average."""
    h = paying(4.0, 1e-3, 1e-4)
    decoding(h, rows=4, max_tokens=3_000)
    first = h.request(range(1, 1_001), 1)
    answered(h, first)
    h.executor.seconds = 60.0
    h.turn()
    h.executor.seconds = 1e-3
    second = h.request(range(2_001, 3_001), 1)
    before = len(h.executor.plans)
    answered(h, second)
    assert len(h.executor.plans) - before < 200


def test_a_slow_first_step_is_no_debt_of_prompts() -> None:
    """The first step compiles something. The steps behind it do not take back what it paid in."""
    h = paying(4.0, 2.0, 1e-4)
    h.request([1] * 4, 3_000)
    h.turn()
    h.turn()
    h.executor.seconds = 1e-3
    for _ in range(30):
        h.turn()
    prompt, before = h.request(range(1, 101), 1), len(h.executor.plans)
    answered(h, prompt)
    assert len(h.executor.plans) - before <= 4


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("seconds", [0.1, 1.0, 5.0])
def test_a_slow_first_prompt_is_no_debt_of_those_behind_it(depth: int, seconds: float) -> None:
    """The first prompt warms up, alone. Prompts beside the first rows come before any step without chunks."""
    h = paying(40.0, seconds, 1e-5, depth=depth)
    h.request([9], 1)
    h.run()
    h.executor.seconds = 1e-2
    for row in range(4):
        h.request([row + 1] * 4, 3_000)
    h.request(range(1_000, 4_500), 1)
    second, before = h.request(range(5_000, 5_600), 1), len(h.executor.plans)
    for _ in range(100):
        h.turn()
    assert h.delivered[second.id], len(h.executor.plans) - before


def test_a_lone_prompt_does_not_wait_for_steps_that_took_longer() -> None:
    """Seconds differ by 2% from step to step: nothing is owed."""
    h = harness(target=0.0, costs=None, prefill_weight=4.0)
    rng = np.random.default_rng(1)
    h.executor.token_seconds = 1e-4
    decoding(h, rows=4, max_tokens=4_000)
    for number in range(20):
        for _ in range(40):
            h.executor.seconds = 1e-2 * rng.uniform(0.98, 1.02)
            h.turn()
        h.request(range(100 * number, 100 * number + 60), 1)
        h.turn()
        assert h.executor.plans[-1].chunks
        for _ in range(20):
            h.turn()


def test_prompts_pay_though_no_step_was_without_them() -> None:
    """If every step had chunks, the time of one without is unknown: such a step is planned to measure it."""
    h = paying(1.0, 1e-2, 1e-4)
    for row in range(4):
        h.request([row + 1] * 4, 2_000)
    for number in range(4):
        h.request(range(1_000 * number, 1_000 * number + 4_000), 1)
    for _ in range(300):
        h.turn()
    plain = sum(not plan.chunks for plan in h.executor.plans)
    assert plain > 100


def test_prompt_tokens_that_took_no_time_for_long_are_not_limited() -> None:
    """Many rows become few: steps with chunks take less than rows alone did, and the average decays to
    nothing; it has divided by zero."""
    h = paying(1.0, 1e-2, 1e-9)
    decoding(h, rows=3, max_tokens=10_000)
    h.scheduler._prefills.budget._prompt_seconds = 2e-323
    h.request(range(1, 601), 4)
    for _ in range(20):
        h.turn()
    assert any(plan.chunks for plan in h.executor.plans[-20:])


def budget(costs: ChunkCosts | None = COSTS, **settings: float) -> ChunkBudget:
    sizes = Capabilities(
        num_pages=2, page_size=1, max_rows=64, context_length=9, vocab_size=9, max_step_tokens=STEP,
        chunk_costs=costs,
    )  # fmt: skip
    return ChunkBudget(ScheduleConfig(**settings or {"itl_target": 11.0}), sizes)


def planned(rows: int, tokens: int) -> PlanBuilder:
    found = PlanBuilder(STEP, 64, 0.0, NO_DRAFTS)
    found.decode_tokens, found.prompt_tokens, found.prompts = rows, tokens, 1
    found.decode_slots = np.arange(rows)
    return found


def room(found: ChunkBudget, rows: int) -> int:
    """Prompt tokens of a step beside so many rows."""
    return found.room(planned(rows, 0), 0, 100)


def taking(rows: int, tokens: int, seconds: float, steps: int) -> int:
    """Room beside `rows` rows after so many equal steps."""
    found = budget()
    for _ in range(steps):
        found.spend(planned(rows, tokens))
        found.learn(seconds)
        found._account = 0.0
    return room(found, 16)


def test_what_costs_leave_out_is_learned_from_steps() -> None:
    assert taking(16, 0, 2.6e-3, 50) == 80, "as measured"
    assert taking(16, 0, 5.8e-3, 50) == 48, "3.2 ms for keys that rows read"
    assert taking(16, 80, 2 * 10.6e-3, 50) == 16, "twice the predicted time"
    assert taking(16, 80, 60.0, 1) == 64, "an accident counts for one step"
    assert taking(16, 80, 0.0, 50) == 80, "an executor that does not measure"


@pytest.mark.parametrize("drafts", [0, 48])
def test_rows_with_drafts_are_no_more_rows(drafts: int) -> None:
    """Prompts would get a fifth of the share beside rows of four drafts each."""
    found = budget(None, prefill_weight=4.0)
    found.spend(planned(12, 0))
    found.learn(1e-3)
    mixed = planned(12, 100)
    mixed.decode_tokens += drafts
    found.spend(mixed)
    found.learn(11e-3)
    paused = 0
    while not room(found, 12):
        plain = planned(12, 0)
        plain.decode_tokens += drafts
        found.spend(plain)
        found.learn(1e-3)
        paused += 1
    assert paused == 29, "10 ms less the share of 11; a quarter of a millisecond each"


def test_prompts_that_took_no_time_are_not_limited() -> None:
    """A step of a few prompt tokens may be quicker than steps without any are on average."""
    found = budget(None, prefill_weight=0.1)
    for tokens, seconds in ((0, 2e-3), (1, 1e-3), (1, 1e-3)):
        found.spend(planned(12, tokens))
        found.learn(seconds)
        assert room(found, 12) == STEP


def test_time_that_prompts_did_not_use_is_not_saved() -> None:
    found = budget()
    idle = planned(16, 0)
    idle.prompts = 0
    for _ in range(100):
        found.spend(idle)
        found.learn(0.0)
    assert found._account == 0.0
    for _ in range(100):
        found.spend(planned(16, 0))
        found.learn(0.0)
    assert found._account == pytest.approx(0.011), "one target"


def test_costs_of_nothing_stop_no_prompt() -> None:
    """A step of rows alone pays for chunks, whatever was measured."""
    free = ChunkCosts(CostTable((16, STEP), (0.0, 0.0)), 0.0)
    h = harness(costs=free, prefill_weight=0.5)
    decoding(h, rows=2, max_tokens=60)
    long = h.request(range(1, 601), 4)
    h.run()
    h.check(long)
    found = budget(free)
    found.spend(planned(16, 80))
    found.learn(5.0)


@pytest.mark.parametrize(
    ("rows", "length", "weight", "most"),
    [
        (BESIDE, 400, 40, 256),
        (BESIDE - 4, 400, 40, 460),
        (BESIDE - 4, 1_200, 40, 256),
        (1, 513, 40, 256),
        (1, 512, 40, 512),
        (0, 1_200, 40, 512),
        (BESIDE, 1_200, 0, 512),
    ],
)
def test_steps_beside_many_rows_or_of_long_prompts_have_half_of_the_tokens(
    rows: int, length: int, weight: float, most: int
) -> None:
    """To a page of 4. Each text equals the oracle's."""
    h = Harness(pages=2_000, rows=80, step_tokens=512, prefill_weight=weight)
    decoding(h, rows, 40)
    before = len(h.executor.plans)
    sent = h.request(range(1, length + 1), 5)
    h.run()
    largest = max(plan.num_tokens for plan in h.executor.plans[before:] if plan.chunks)
    assert most - 4 < largest <= most
    h.check(sent)


SHORT = 160
"""Prompt tokens that take `HELD` seconds below."""


@pytest.mark.parametrize(
    ("rows", "prompts", "length", "weight", "sizes", "most"),
    [
        (8, 20, 40, 40.0, (), SHORT),
        (8, 20, 40, 40.0, (64, 128, 256, 512), 128 - 8),  # a padded size
        (8, 20, 40, 40.0, (256, 512), SHORT),  # all are larger
        (8, 3, SHORT + 1, 40.0, (), 483),  # not short
        (8, 4, 130, 40.0, (), SHORT),
        (4, 20, 40, 40.0, (), 508),  # many prompts for the rows
        (BESIDE - 4, 4, 100, 40.0, (), SHORT),
        (BESIDE, 20, 40, 40.0, (), 256 - BESIDE),  # half of a step
        (8, 20, 40, 0.0, (), 504),  # no weight
    ],
)
def test_a_step_of_short_prompts_beside_some_rows_is_short(
    rows: int, prompts: int, length: int, weight: float, sizes: tuple[int, ...], most: int
) -> None:
    """The last prompt's rest is computed in the next step: texts equal the oracle's."""
    h = Harness(pages=5_000, rows=100, step_tokens=512, sizes=sizes, prefill_weight=weight)
    h.executor.seconds, h.executor.token_seconds = 1e-3, chunk_budget.HELD / SHORT
    decoding(h, rows, 60)
    before = len(h.executor.plans)
    sent = [h.request(range(1_000 * i, 1_000 * i + length), 5) for i in range(1, prompts + 1)]
    h.run()
    taken = [plan.num_tokens - len(plan.decode_slots) for plan in h.executor.plans[before:]]
    assert max(taken) == pytest.approx(most, abs=4), "to a page of 4"
    for request in sent:
        h.check(request)


# -- padded step sizes ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "wanted", "taken"),
    [
        (100, 156, 156),  # a size as it is
        (100, 160, 156),
        (100, 208, 156),  # a quarter is left
        (100, 240, 240),  # a third would not do
        (300, 260, 212),
        (70, 50, 50),  # no size is as small
        (100, 413, 413),  # has no room
        (BESIDE - 1, 160, 160),
    ],
)
def test_a_step_is_cut_to_the_next_smaller_size(rows: int, wanted: int, taken: int) -> None:
    h = Harness(sizes=(128, 256, 512))
    builder = PlanBuilder(512, 512, 0.0, NO_DRAFTS)
    builder.decode_tokens, builder.prompts, builder.room = rows, SEVERAL, 512 - rows
    h.scheduler._prefills.budget.fill_size(builder, wanted)
    assert min(builder.room, wanted) == min(taken, 512 - rows)


@pytest.mark.parametrize("prompts", [SEVERAL - 1, SEVERAL])
@pytest.mark.parametrize("rows", [BESIDE - 1, BESIDE])
def test_several_prompts_beside_many_rows_fill_a_size(rows: int, prompts: int) -> None:
    """The rest of the last prompt comes in the next step. Each text equals the oracle's."""
    h = Harness(pages=2_000, rows=80, step_tokens=512, sizes=(64, 96, 128, 512))
    decoding(h, rows, 30)
    before = len(h.executor.plans)
    sent = [h.request(range(100 + 20 * i, 110 + 20 * i), 5) for i in range(prompts)]
    h.run()
    first, second = h.executor.plans[before : before + 2]
    if rows < BESIDE or prompts < SEVERAL:
        assert (first.num_tokens, len(second.chunks)) == (rows + 10 * prompts, 0)
    else:
        assert first.num_tokens == 96
        assert sum(len(chunk.tokens) for chunk in second.chunks) == 10 * prompts - (96 - rows)
    for request in sent:
        h.check(request)
