"""The costs of steps, as a runner measures them at its start."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from core.config import CacheConfig, ModelConfig, ParallelConfig, ScheduleConfig
from core.costs import CostTable
from core.plan import StepPlan, StepResult
from core.request import SamplingParams
from gpu.build import Beside, build_executor, spec_of
from gpu.ranks import make_ranks
from gpu.runner import ModelRunner
from gpu.state.entry import Limits
from gpu.state.tables import SlotTables
from gpu.step.buffers import HiddenShape
from gpu.step.costs import REPEATS, measure_chunks, measure_costs
from gpu.step.launched import LaunchedStep
from gpu.step.rings import Entries
from gpu.step.shape import Shape
from gpu.step.shapes import decode_sizes, mixed_sizes
from gpu.thread import device_thread
from tests.rigs import tiny_model
from tests.rigs.driver import Driver
from tests.rigs.runner import CPU, Rig

ROWS, DRAFTS, VOCAB = 24, 3, 1000


@pytest.fixture(autouse=True)
def measured_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure longer than other tests do."""
    monkeypatch.setattr("gpu.step.costs.SECONDS", 0.6)


class Timed:
    """A device on which a token takes a second, a draft's row three, and the first of each kind a minute."""

    def __init__(self, tables: SlotTables) -> None:
        self.plans: list[StepPlan] = []
        self._tables = tables

    def launch(self, plan: StepPlan) -> LaunchedStep:
        self.plans.append(plan)
        tokens = self._tables.last_token[plan.decode_slots.tolist()]
        assert len(set(tokens.tolist())) == len(tokens), "routers would choose the same experts"
        first = len(self.plans) % REPEATS == 1
        lengths = self._tables.length[plan.decode_slots.tolist()].tolist()
        assert same(lengths, 0 if first else 1), "routers choose the same experts for all first tokens"
        seconds = plan.num_tokens + 3 * len(plan.decode_slots) * plan.proposes
        return cast("LaunchedStep", self._Step(60.0 if first else seconds))

    class _Step:
        def __init__(self, seconds: float) -> None:
            self.wait: Any = lambda: StepResult(0, np.zeros(0, np.int32), seconds=seconds)


def test_each_size_has_its_cost() -> None:
    tables = SlotTables(ROWS, 4, CPU, DRAFTS)
    device, sizes = Timed(tables), decode_sizes(80)
    costs = measure_costs(device.launch, tables, sizes, VOCAB)
    assert costs.verify.sizes == tuple(sizes)
    assert costs.verify.seconds == tuple(map(float, sizes)), "sizes that are not measured are on a line"
    assert costs.draft.seconds == tuple(3.0 * size for size in costs.draft.sizes)
    assert max(costs.draft.sizes) <= ROWS
    assert all(plan.drafts <= DRAFTS * len(plan.decode_slots) for plan in device.plans)
    assert not tables.drafts.any() and not tables.length.any()


def test_steps_take_what_the_next_size_takes() -> None:
    table = CostTable((1, 4, 8), (1.0, 2.0, 4.0))
    assert table.upto(10).tolist() == [1, 1, 2, 2, 2, 4, 4, 4, 4, 4.5, 5]
    assert CostTable((1, 4), (2.0, 1.5)).upto(4).tolist() == [2] * 5, "more tokens never take less"


def test_a_runner_measures_itself(tmp_path: Path) -> None:
    rig = Rig(tiny_model.build("qwen3-moe", tmp_path).path, 16, 4, 128)
    limits = Limits(4, 4, 64, 64, 9, samples=16, drafts=DRAFTS)
    runner = ModelRunner(rig.runner.shape, rig.runner._machine, Entries(limits, 4, CPU))
    with device_thread(CPU):
        runner.use_model(rig.model)
        runner.use_pool(rig.pool)
        runner.prepare()
        costs = measure_costs(runner.launch, runner.tables, range(1, 17), rig.spec.vocab_size)
    assert costs.verify.sizes == tuple(range(1, costs.verify.sizes[-1] + 1))
    assert all(seconds > 0 for seconds in costs.verify.seconds)
    for column in ("length", "last_token"):
        assert int(getattr(runner.tables, column)[0]) == 0, "slot 0 stays neutral"
    assert same(runner.tables.drafts.flatten().tolist(), 0)


def same(values: Iterable[int], value: int) -> bool:
    return all(each == value for each in values)


CHUNKS = Shape(4, 512, 4, 64, 16, VOCAB, HiddenShape(8, torch.float32))
"""Contexts of 1,024 tokens."""


def test_chunks_have_a_cost_by_tokens_and_one_by_keys() -> None:
    """The device takes a second for a token, and a hundredth of one for a query and a key."""
    tables, plans = SlotTables(4, 64, CPU), list[StepPlan]()

    def launch(plan: StepPlan) -> LaunchedStep:
        plans.append(plan)
        (chunk,) = plan.chunks
        count = len(chunk.tokens)
        assert chunk.start + count <= 1024, "within the context"
        assert max(chunk.tokens) < VOCAB and len(set(chunk.tokens.tolist())) > count // 2
        seconds = 5 + count + 0.01 * count * (chunk.start + count / 2)
        first = len(plans) % REPEATS == 1
        return cast("LaunchedStep", Timed._Step(1e6 if first else seconds))

    costs = measure_chunks(launch, tables, CHUNKS)
    assert costs.pair == pytest.approx(0.01)
    assert costs.step.sizes == tuple(mixed_sizes(512))
    assert costs.step.seconds == pytest.approx([5.0 + size for size in costs.step.sizes])
    assert not tables.length.any()


class SlowToRead:
    """Two ranks with `ENTRIES` entries. The second reads no answer until the first waits or has ended."""

    ENTRIES = 4

    def __init__(self) -> None:
        self.read = [0, 0]
        self._launched = [0, 0]
        self._group, self._ranks = make_ranks(2)
        self.blocked = threading.Event()
        """The first rank waits for the second, or has ended."""

    def launch(self, rank: int, plan: StepPlan) -> LaunchedStep:
        assert self._launched[rank] - min(self.read) < self.ENTRIES, "the entry is still read"
        self._launched[rank] += 1

        def wait() -> StepResult:
            assert rank == 0 or self.blocked.wait(10)
            self.read[rank] += 1
            return StepResult(0, np.zeros(0, np.int32), seconds=1.0)

        return cast("LaunchedStep", SimpleNamespace(wait=wait))

    def late(self, rank: int, deadline: float) -> bool:
        if rank:
            return self._ranks[rank].late(deadline)
        self.blocked.set()
        late = self._ranks[rank].late(deadline)
        self.blocked.clear()
        return late

    def end(self) -> None:
        """A rank launches no more."""
        self.blocked.set()
        self._group.abort("it has ended")


@pytest.mark.parametrize("what", ["steps", "chunks"])
def test_no_rank_writes_over_an_entry_that_another_still_reads(what: str) -> None:
    ranks = SlowToRead()

    def measure(rank: int) -> None:
        launch, late = partial(ranks.launch, rank), partial(ranks.late, rank)
        try:
            if what == "steps":
                measure_costs(launch, SlotTables(ROWS, 4, CPU, DRAFTS), decode_sizes(80), VOCAB, late)
            else:
                measure_chunks(launch, SlotTables(4, 64, CPU), CHUNKS, late)
        except AssertionError:
            ranks.end()
            raise
        if rank == 0:
            ranks.blocked.set()

    with ThreadPoolExecutor(2) as pool:
        for measured in [pool.submit(measure, rank) for rank in range(2)]:
            measured.result()
    assert ranks.read[0] == ranks.read[1] > 5 * REPEATS


def test_a_context_of_few_tokens_has_no_chunks_far_behind() -> None:
    tables = SlotTables(4, 1, CPU)
    device = SimpleNamespace(wait=lambda: StepResult(0, np.zeros(0, np.int32), seconds=2.0))
    found = measure_chunks(lambda plan: cast("LaunchedStep", device), tables, CHUNKS._replace(pages=1))
    assert (found.step.sizes, found.step.seconds, found.pair) == ((16,), (2.0,), 0.0)


@pytest.mark.parametrize("tp", [1, 2])
def test_prompts_are_paced_by_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp: int
) -> None:
    """A target that no step meets: chunks beside rows are the least, and texts those without a target."""
    monkeypatch.setattr("core.schedule.chunk_budget.LEAST_CHUNK", 16)
    path = tiny_model.build("llama", tmp_path).path
    prompts = [[int(i * seed % 250) + 3 for i in range(100)] for seed in (7, 11, 13)]
    params = [SamplingParams(temperature=0.0, max_tokens=30)] * len(prompts)
    texts, most = list[list[list[int]]](), list[int]()
    for target in (0.0, 1e-3):
        schedule = ScheduleConfig(step_tokens=512, max_running=4, itl_target=target)
        model, cache = ModelConfig(device="cpu"), CacheConfig(page_size=4, kv_tokens=4096)
        beside = Beside(parallel=ParallelConfig(tp=tp))
        made = build_executor(spec_of(path), path, model, cache, schedule, lambda *_: None, beside)
        made.prepare(lambda share: None)
        assert (made.capabilities.chunk_costs is None) == (target == 0.0)
        driver, plans = Driver(made, schedule), list[StepPlan]()
        submit = made.submit
        monkeypatch.setattr(made, "submit", lambda plan, s=submit, p=plans: (p.append(plan), s(plan)))
        texts.append([answer.tokens for answer in driver.run(prompts, params)])
        driver.close()
        most.append(max(len(c.tokens) for plan in plans if len(plan.decode_slots) for c in plan.chunks))
    assert texts[0] == texts[1]
    assert most == [100, 16]
