"""The costs of steps, as a runner measures them at its start."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np

from core.costs import CostTable
from core.plan import StepPlan, StepResult
from gpu.runner import ModelRunner
from gpu.state.entry import Limits
from gpu.state.tables import SlotTables
from gpu.step.costs import REPEATS, measure_costs
from gpu.step.launched import LaunchedStep
from gpu.step.rings import Entries
from gpu.step.shapes import decode_sizes
from gpu.thread import device_thread
from tests.rigs import tiny_model
from tests.rigs.runner import CPU, Rig

ROWS, DRAFTS, VOCAB = 24, 3, 1000


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
