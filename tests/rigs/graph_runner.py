"""Compares the fused step with the plain one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from core.plan import Chunk, NewSlot, Save, StepPlan, StepResult
from gpu.attention import AttentionBackend
from gpu.kernels.delta import gated_delta
from gpu.kernels.moe.tuned import MoeConfigs, MoeShape
from gpu.kernels.sampling import kernels as triton_kernels
from gpu.kernels.step import begin_step
from gpu.kv.pool import KvPool
from gpu.kv.states import StatePool
from gpu.ops.fused import Kernels, TritonOps
from gpu.runner import ModelRunner
from gpu.state.view import StepView
from gpu.step.buffers import HiddenShape
from gpu.step.graphs import Launcher, Work
from gpu.step.machine import Machine
from gpu.step.shape import Shape
from gpu.step.steps import PaddedSizes
from gpu.thread import device_thread
from tests.rigs.attention import EagerAttention
from tests.rigs.runner import CPU, Rig

PAGE, ROWS, PAGES = 4, 4, 300
PROMPT = [int(i * 31 % 250) + 2 for i in range(14)]


class NoWarmUp:
    """Plain launches without the warm-up of every size, which takes seconds in Triton's interpreter and
    compiles nothing."""

    def capture(self, work: Work, warm: Work) -> Work:
        """See `Launcher.capture`."""
        return work


def captured_machine(
    rig: Rig,
    sizes: PaddedSizes,
    launcher: Callable[[], Launcher] = NoWarmUp,
    attention: AttentionBackend | None = None,
) -> Machine:
    """A machine with a GPU's kernels, in padded sizes. Without `attention` it is plain, token by token."""
    spec = rig.spec
    windows = [spec.window(layer) for layer in range(spec.layers)]
    attention = attention or EagerAttention((), windows, spec.softmax_scale)
    configs = None
    if (moe := spec.moe) is not None:
        configs = MoeConfigs(
            MoeShape(moe.experts, moe.intermediate, spec.hidden, moe.per_token, "float32", "none")
        )

    def ops(pool: KvPool) -> Callable[[StepView], TritonOps]:
        return lambda view: TritonOps(view, Kernels(attention, pool.caches(), configs))

    return Machine(CPU, sizes, launcher, attention, ops, begin_step, triton_kernels, delta=gated_delta)


class Both:
    """A CPU runner, and one with the kernels and sizes of a GPU, with the same plans."""

    def __init__(self, path: Path, launcher: Callable[[], Launcher] = NoWarmUp, **changes: Any) -> None:
        """`changes` are fields of the second one's `Machine`."""
        self.rig = rig = Rig(path, PAGE, ROWS, PAGE * PAGES)
        spec = rig.spec
        width = HiddenShape(spec.hidden, torch.float32)
        self.shape = Shape(ROWS, 128, ROWS, PAGES + 1, PAGE, spec.vocab_size, width)
        machine = captured_machine(rig, PaddedSizes(ROWS, 128, ROWS), launcher)._replace(**changes)
        self.runner = ModelRunner(self.shape, machine, self.shape.entries(CPU))
        heads = spec.kv_shape
        with device_thread(CPU):
            self.runner.use_model(rig.model)
            pool = KvPool(spec.layers, PAGES + 1, PAGE, heads, torch.float32, CPU)
            if spec.linear is not None:
                pool.states = StatePool(spec.linear, ROWS + 1, 8, torch.float32, CPU)
            self.runner.use_pool(pool)
            self.runner.prepare()

    def step(
        self,
        decode: Sequence[int] = (),
        chunks: Sequence[Chunk] = (),
        new: Sequence[NewSlot] = (),
        saves: Sequence[Save] = (),
    ) -> StepResult:
        """Run one plan with both; all results must agree."""
        plan = msgspec.structs.replace(self.rig.plan(decode, chunks, new), saves=tuple(saves))
        with device_thread(CPU):
            want = self.rig.runner.launch(plan).wait()
            got = self.runner.launch(plan).wait()
        agree(plan, got, want)
        return got


def agree(plan: StepPlan, got: StepResult, want: StepResult) -> None:
    assert got.step == plan.step
    assert got.tokens.tolist() == want.tokens.tolist()
    assert not got.tokens.flags.writeable
    assert got.failed == want.failed
    assert got.logprobs.keys() == want.logprobs.keys()
    for row, mine in got.logprobs.items():
        assert mine.chosen == pytest.approx(want.logprobs[row].chosen, abs=1e-3)
        assert mine.top_ids.tolist() == want.logprobs[row].top_ids.tolist()
        assert mine.entropy == pytest.approx(want.logprobs[row].entropy, abs=1e-3)
        assert (mine.support is None) == (want.logprobs[row].support is None)
        if mine.support is not None:
            assert mine.support.ids.tolist() == want.logprobs[row].support.ids.tolist()
            assert mine.support.chosen == pytest.approx(want.logprobs[row].support.chosen, abs=1e-3)
    assert got.prompt_logprobs.keys() == want.prompt_logprobs.keys()
    for slot, mine in got.prompt_logprobs.items():
        theirs = want.prompt_logprobs[slot]
        assert mine.start == theirs.start
        np.testing.assert_allclose(mine.values, theirs.values, atol=1e-3)
    assert got.hidden.keys() == want.hidden.keys()
    for slot, states in got.hidden.items():
        np.testing.assert_allclose(states, want.hidden[slot], atol=1e-3)
    assert got.experts.keys() == want.experts.keys()
    for slot, chosen in got.experts.items():
        np.testing.assert_array_equal(chosen, want.experts[slot])
