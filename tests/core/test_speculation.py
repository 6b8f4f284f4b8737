"""How many drafts steps verify: throughput in simulated time, by measured costs and given acceptance."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest

from core.cache.manager import CacheManager
from core.config import ScheduleConfig
from core.costs import CostTable, StepCosts
from core.executor import Capabilities
from core.plan import StepPlan, StepResult
from core.request import Request, SamplingParams
from core.schedule.scheduler import Scheduler
from core.schedule.speculation import DraftBudget, Grant
from core.types import NO_TOKENS, Ints, NDArray64
from tests.rigs.scheduler import Harness

MOST = 5
SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 513, 32), *range(576, 1025, 64))


def table(points: dict[int, float], sizes: Sequence[int] = SIZES) -> CostTable:
    """Milliseconds at some sizes as seconds of all."""
    seconds = np.interp(sizes, list(points), list(points.values())) / 1e3
    return CostTable(tuple(sizes), tuple(seconds.tolist()))


DENSE = StepCosts(
    verify=table({1: 4.4, 64: 5.0, 256: 7.5, 512: 10.5, 1024: 17.0}), draft=table({1: 0.9, 32: 1.0, 256: 1.6})
)
"""Costs like those of an 8B on an H200."""
EXPERTS = StepCosts(
    verify=table({1: 3.0, 2: 4.0, 4: 5.6, 8: 7.6, 16: 9.0, 32: 9.8, 64: 10.5, 256: 13.0, 1024: 26.0}),
    draft=table({1: 0.6, 32: 0.7, 256: 1.2}),
)
"""Costs like those of a mixture of experts: a few tokens more wake many more of them."""


class Load(NamedTuple):
    """`rows` requests of `tokens` tokens each. The draft at each position of a row is accepted with `chances`
    if those before it are; from half of the tokens on with `later`. Of all rows a share of `found` has drafts
    in a step, others in the next. One request of 32 after the other has `spread` tokens less."""

    rows: int
    tokens: int
    chances: tuple[float, ...]
    later: tuple[float, ...] | None = None
    found: float = 1.0
    spread: int = 0


class Simulation:
    """The step loop over a device that has no model but takes its time: a step's padded tokens, what its
    drafter takes, and `reads` seconds that no table knows, without drafts and with. The host takes at least
    `host` seconds for a step, likewise; `bursts`: it hears of two steps at once."""

    def __init__(
        self,
        load: Load,
        costs: StepCosts,
        capabilities: Capabilities,
        reads: tuple[float, float] = (0.0, 0.0),
        seed: int = 0,
        host: tuple[float, float] = (0.0, 0.0),
        bursts: bool = False,
    ) -> None:
        self.now, self.made = 0.0, 0
        self._host, self._bursts, self._held = host, bursts, 0.0
        # By slot.
        self.lengths: NDArray64 = np.zeros(capabilities.max_rows + 1, np.int64)
        self.limits = np.zeros_like(self.lengths)
        self.plans: list[StepPlan] = []
        self._load, self._costs, self._reads = load, costs, reads
        self._rng = np.random.default_rng(seed)
        self._most = capabilities.max_drafts
        cache = CacheManager(capabilities.num_pages, capabilities.page_size)
        self.scheduler = Scheduler(capabilities, cache, ScheduleConfig(), lambda: self.now)
        self.steps: deque[StepPlan] = deque()

    def run(self, requests: list[Request], depth: int = 1) -> float:
        """Simulated seconds until all have ended."""
        self.scheduler.add(requests)
        while not self.scheduler.idle:
            while self.scheduler.in_flight <= depth and (plan := self.scheduler.plan()) is not None:
                self.steps.append(plan)
                self.plans.append(plan)
            self.scheduler.apply(self._step(self.steps.popleft()))
            if len(self.plans) % 50 == 0:
                self.scheduler.check_integrity()
        self.scheduler.check_integrity()
        return self.now + self._held

    def _step(self, plan: StepPlan) -> StepResult:
        before = self.plans[plan.step - 1] if plan.step else None
        assert not plan.drafts or (before is not None and before.proposes), "nobody drafted them"
        for new in plan.new_slots:
            self.lengths[new.slot], self.limits[new.slot] = new.cached, new.limit
        slots = plan.decode_slots
        found = self._rng.random(len(slots)) < self._load.found
        left = np.maximum(self.limits[slots] - self.lengths[slots], 0)
        given = _given(found * left, plan)
        chances = self._load.chances
        if self._load.later is not None and 2 * self.made >= self._load.rows * self._load.tokens:
            chances = self._load.later
        hits = self._rng.random((len(slots), len(chances))) < chances
        counts = 1 + np.minimum(hits.cumprod(1).sum(1), given)
        counts = np.minimum(counts, left)
        self.lengths[slots] += counts
        for chunk in plan.chunks:
            self.lengths[chunk.slot] = chunk.start + len(chunk.tokens)
        ends = sum(chunk.samples for chunk in plan.chunks)
        counts = np.concatenate((counts, np.ones(ends, np.int32)), dtype=np.int32)
        self.made += int(counts.sum())
        seconds = self._seconds(self._costs.verify, plan.num_tokens) + self._reads[plan.drafts > 0]
        if plan.proposes:
            seconds += self._seconds(self._costs.draft, len(counts))
        self._held += max(seconds, self._host[plan.drafts > 0])
        if plan.step % 2 or not self._bursts:
            self.now, self._held = self.now + self._held, 0.0
        tokens = np.ones(counts.sum(), np.int32)
        if not plan.drafts and len(tokens) == len(counts):
            return StepResult(plan.step, tokens, seconds=seconds)
        drafted = np.concatenate((given, np.zeros(ends, np.int32)), dtype=np.int32) if self._most else None
        return StepResult(plan.step, tokens, counts=counts, drafted=drafted, seconds=seconds)

    @staticmethod
    def _seconds(costs: CostTable, count: int) -> float:
        """Seconds of the next size, as graphs are padded."""
        return costs.seconds[min(bisect_left(costs.sizes, count), len(costs.sizes) - 1)]


def _given(left: NDArray64, plan: StepPlan) -> NDArray64:
    """Drafts by row of a step whose rows still take `left` tokens: each row's first, then each one's second,
    and so on."""
    most = np.maximum(np.minimum(left, plan.query_length) - 1, 0)
    if int(most.sum()) <= plan.drafts:
        return most
    given, drafts = np.zeros_like(most), plan.drafts
    for depth in range(1, plan.query_length):
        rows = np.flatnonzero(most >= depth)[:drafts]
        given[rows], drafts = depth, drafts - len(rows)
    return given


def simulated(
    load: Load,
    costs: StepCosts,
    drafts: int = MOST,
    *,
    adaptive: bool = True,
    reads: tuple[float, float] = (0.0, 0.0),
    depth: int = 1,
    slots: int = 256,
    host: tuple[float, float] = (0.0, 0.0),
    bursts: bool = False,
) -> Simulation:
    """A simulation with at most `drafts` a row, always or as the costs tell. `slots` requests run at once."""
    pages = -(-(load.tokens + 8) // 16) + 1
    rows = min(load.rows, slots)
    capabilities = Capabilities(
        num_pages=rows * pages + 8, page_size=16, max_rows=rows, context_length=16 * pages,
        vocab_size=10, max_step_tokens=2048, max_drafts=drafts, max_samples=1024,
        costs=costs if adaptive else None,
    )  # fmt: skip
    simulation = Simulation(load, costs, capabilities, reads, load.rows, host, bursts)
    params = [SamplingParams(max_tokens=load.tokens - load.spread * at) for at in range(32)]
    prompts = [np.array([1 + at // 9, 1 + at % 9, *range(6)], np.int32) for at in range(load.rows)]
    simulation.run([Request(f"r{at}", prompt, params[at % 32]) for at, prompt in enumerate(prompts)], depth)
    return simulation


def chances(length: float) -> tuple[float, ...]:
    """Chances that make rows of `length` tokens a step with all drafts, falling with the position."""
    low, high = 0.0, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        made = 1 + sum(np.cumprod([middle * 0.97**j for j in range(MOST)]))
        low, high = (middle, high) if made < length else (low, middle)
    return tuple(low * 0.97**j for j in range(MOST))


GOOD, BAD = chances(3.0), chances(1.0)


def tokens(rows: int) -> int:
    return 1024 if rows <= 16 else 500


@cache
def without(rows: int, costs: StepCosts) -> float:
    """Seconds of the load without drafts."""
    return simulated(Load(rows, tokens(rows), BAD), costs, drafts=0).now


ROWS = (1, 4, 16, 64, 128, 256)
COSTS = pytest.mark.parametrize("costs", [DENSE, EXPERTS], ids=["dense", "experts"])
PAIRS = [(rows, costs) for rows in ROWS for costs in (DENSE, EXPERTS)]
# Each number of rows, and of each model few and many.
TURNS, OTHER_TURNS = (
    pytest.mark.parametrize(("rows", "costs"), [PAIRS[at + (at // 2 + first) % 2] for at in range(0, 12, 2)])
    for first in (0, 1)
)


@COSTS
@pytest.mark.parametrize(
    ("rows", "depth"),
    [*((rows, 1) for rows in ROWS), *((rows, depth) for rows in (4, 128) for depth in (0, 2))],
)
def test_rejected_drafts_cost_nothing(rows: int, depth: int, costs: StepCosts) -> None:
    simulation = simulated(Load(rows, tokens(rows), BAD), costs, depth=depth)
    assert without(rows, costs) / simulation.now >= 0.99
    assert sum(plan.proposes for plan in simulation.plans[-400:]) > 0, "it is tried again"


@TURNS
def test_acceptance_that_ends_halfway(rows: int, costs: StepCosts) -> None:
    simulation = simulated(Load(rows, 2 * tokens(rows), GOOD, later=BAD), costs)
    assert 2 * without(rows, costs) / simulation.now >= 0.99


@OTHER_TURNS
def test_acceptance_that_begins_halfway(rows: int, costs: StepCosts) -> None:
    load = Load(rows, 2 * tokens(rows), BAD, later=GOOD)
    best = simulated(Load(rows, tokens(rows), GOOD), costs).now
    half = simulated(load, costs).now - without(rows, costs)
    assert half <= 1.3 * best


@TURNS
def test_as_good_as_the_best_fixed_number(rows: int, costs: StepCosts) -> None:
    load = Load(rows, tokens(rows), GOOD)
    fixed = [simulated(load, costs, drafts, adaptive=False).now for drafts in range(1, MOST + 1)]
    assert simulated(load, costs).now <= min(*fixed, without(rows, costs)) / 0.95


@pytest.mark.parametrize("rows", [64, 256])
def test_time_that_no_table_knows_counts_for_both(rows: int) -> None:
    """Attention over long prompts: a step takes twice as long, and drafts cost half as much of it."""
    load = Load(rows, tokens(rows), GOOD)
    plain, fixed, adaptive = (
        simulated(load, DENSE, drafts, adaptive=adapts, reads=(0.01, 0.01))
        for drafts, adapts in ((0, False), (MOST, False), (MOST, True))
    )
    assert adaptive.now <= 1.02 * fixed.now < plain.now
    few = simulated(load, DENSE)
    most = [max(plan.drafts for plan in each.plans[100:]) for each in (few, adaptive)]
    assert most[0] < most[1]


@pytest.mark.parametrize("rows", [8, 32])
def test_drafts_that_take_longer_than_was_measured(rows: int) -> None:
    """A mixture's texts wake more experts than the tokens that were measured: each try of drafts that are
    all rejected takes a fifth of a step longer."""
    load = Load(rows, tokens(rows), BAD)
    plain, adaptive = (simulated(load, EXPERTS, drafts, reads=(0.0, 1.5e-3)) for drafts in (0, MOST))
    assert plain.now / adaptive.now >= 0.99


@pytest.mark.parametrize("bursts", [False, True], ids=["each", "bursts"])
@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("host", [(1e-3, 1e-3), (1e-3, 1.5e-3)], ids=["alike", "longer"])
@pytest.mark.parametrize("length", [1.0, 1.3, 3.0])
def test_what_the_host_takes_counts(
    rows: int, host: tuple[float, float], length: float, bursts: bool
) -> None:
    """A small model's step takes the device half a millisecond and the host twice as long, or three times
    where there are drafts: of 1.3 tokens these pay by what the device takes, and not by what passes."""
    load = Load(rows, 500, chances(length))
    small = StepCosts(table({1: 0.5, 1024: 1.5}), table({1: 0.02, 256: 0.1}))
    plain, adaptive = (simulated(load, small, drafts, host=host, bursts=bursts) for drafts in (0, MOST))
    gain = plain.now / adaptive.now
    assert gain >= 0.97
    if length * host[0] / host[1] > 1.2:
        assert gain > 0.78 * length * host[0] / host[1]


def drafting_share(budget: DraftBudget, rows: int, steps: int, began: float) -> tuple[float, float]:
    """Simulate `steps` decode steps that begin at `began` seconds. Returns the share of the last third that
    had drafts, and the time at the end. A step takes the host 0.3 ms and 35 us per token, with drafts 0.25 ms
    and 30 us per row more. It takes the device 0.45 ms, and drafting 0.05 ms."""
    rng, now, drafted = np.random.default_rng(rows), began, 0
    for step in range(steps):
        grant = budget.grant(rows, rows, 1024)
        budget.spend(grant, rows, 0)
        tried = min(grant.drafts // rows, MOST)
        accepted = np.logical_and.accumulate(rng.random((rows, tried)) < 0.6, axis=1).sum(1)
        counts = (1 + accepted).astype(np.int32)
        device = 0.45e-3 + 0.05e-3 * grant.proposes
        now += max(device, 0.3e-3 + 35e-6 * int(counts.sum()) + (0.25e-3 + 3e-5 * rows) * bool(tried))
        result = StepResult(
            step, NO_TOKENS, seconds=device, counts=counts, drafted=np.full(rows, tried, np.int32)
        )
        budget.learn(grant, rows, 0, result, now)
        drafted += tried > 0 and step >= 2 * steps // 3
    return drafted / (steps - 2 * steps // 3), now


def test_drafting_restarts_when_64_clients_become_one() -> None:
    """With 64 streams the host makes drafts too expensive; with one stream they pay. The cost learned with 64
    must not stop the scheduler from trying drafts again."""
    small = StepCosts(table({1: 0.45, 1024: 0.6}), table({1: 0.05, 256: 0.05}))
    capabilities = Capabilities(
        num_pages=100, page_size=16, max_rows=64, context_length=256, vocab_size=10, max_step_tokens=2048,
        max_drafts=MOST, max_samples=1024, costs=small,
    )  # fmt: skip
    budget = DraftBudget(capabilities)
    _, now = drafting_share(budget, 64, 2000, 1.0)
    alone, _ = drafting_share(DraftBudget(capabilities), 1, 3000, 1.0)
    after, _ = drafting_share(budget, 1, 3000, now)
    assert after > 0.9 * alone > 0.5


def test_rows_without_drafts_are_not_paid_for() -> None:
    """A prompt lookup that finds something for a fourth of the rows: the others' drafts fill no graph."""
    load = Load(64, 500, GOOD, found=0.25)
    lookup = StepCosts(DENSE.verify, table({1: 0.05, 256: 0.1}))
    adaptive, fixed = (simulated(load, lookup, adaptive=adapts) for adapts in (True, False))
    assert 32 <= np.mean([plan.drafts for plan in adaptive.plans[50:250]]) <= 64 * MOST / 2
    assert adaptive.now < 0.95 * fixed.now


def test_prompts_that_keep_coming_beside_rows() -> None:
    """Rejected drafts, and steps that are mostly mixed."""
    plain, adaptive = (
        simulated(Load(600, 100, BAD, spread=3), DENSE, drafts, slots=32) for drafts in (0, MOST)
    )
    assert sum(len(plan.chunks) > 0 for plan in plain.plans) > 100
    assert plain.now / adaptive.now >= 0.99


def test_no_row_starves() -> None:
    """A budget for fewer drafts than rows: each row has a token of every step."""
    simulation = simulated(Load(256, 200, GOOD), DENSE)
    decoding = [plan for plan in simulation.plans if len(plan.decode_slots) == 256]
    assert len(decoding) > 50 and len(simulation.plans) <= 202
    assert min(plan.drafts for plan in decoding[20:]) < 256 * MOST


def test_only_rows_that_may_have_drafts_reserve_pages_for_them() -> None:
    h = Harness(pages=200, page_size=1, drafts=7, samples=64, depth=0)
    free, own = h.request([1, 2, 3], 60), h.request([4, 5, 6], 60, processor="it")
    for _ in range(6):
        h.turn()
    assert all(plan.drafts <= 7 for plan in h.executor.plans)
    h.submit()
    held = [len(each.hold.pages) - each.num_tokens for each in (free, own) if each.hold is not None]
    assert held == [7, 0]
    h.run()
    h.check(free)
    h.check(own)


def test_steps_without_drafts_reserve_nothing() -> None:
    """Verification never pays here."""
    dear = StepCosts(CostTable((1, 2, 64), (1.0, 100.0, 200.0)), CostTable((1,), (10.0,)))
    h = Harness(pages=200, page_size=1, drafts=7, samples=64, depth=0, costs=dear)
    a = h.request([1, 2, 3], 60)
    for _ in range(6):
        h.turn()
    for _ in range(20):
        h.submit()
        assert a.hold is not None and len(a.hold.pages) == a.num_tokens
        h.executor.complete()
        h.apply()


def test_each_draft_of_a_tree_has_an_acceptance_of_its_own() -> None:
    """The second and third are siblings: that few paths are deep says nothing of a draft's worth."""
    capabilities = Capabilities(
        num_pages=100, page_size=16, max_rows=8, context_length=256, vocab_size=10, max_step_tokens=256,
        max_drafts=MOST, max_samples=64, costs=DENSE,
    )  # fmt: skip
    budget, rng, worth = DraftBudget(capabilities), np.random.default_rng(0), (0.6, 0.3, 0.1, 0.1)
    for step in range(300):
        first, second, third = (rng.random(8) < chance for chance in (0.6, 0.5, 1 / 3))
        fourth = rng.random(8) < 0.25
        # 1 ─ 2, 1 ─ 3 where 2 is wrong, and 4 beside 1.
        taken = [first, first & second, first & ~second & third, ~first & fourth]
        paths = sum(each.astype(np.int32) << j for j, each in enumerate(taken))
        counts = 1 + sum(each.astype(np.int32) for each in taken)
        drafted: Ints = np.full(8, 4, np.int32)
        grant = Grant(drafts=32, longest=MOST, able=8, proposes=True)
        budget.learn(grant, 8, 0, StepResult(step, NO_TOKENS, counts=counts, drafted=drafted, paths=paths))
    assert budget.acceptance.survival()[:4] == pytest.approx(worth, abs=0.08)
