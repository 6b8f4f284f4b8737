"""Rows of several tokens through a GPU's kernels, in padded sizes: the answers of a CPU without drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from app.engine.job import Job
from core.models import ModelSpec
from core.request import SamplingParams
from gpu.attention import AttentionBackend
from gpu.attention.backend import attention_config
from gpu.attention.selector import device_attention
from gpu.device import CudaFacts
from gpu.draft.model import DraftMachine
from gpu.draft.tree import Tree
from gpu.kernels.sampling import drafts as draft_kernels
from gpu.kv.pool import KvPool
from gpu.ops.fused import Kernels, TritonOps
from gpu.state.entry import CASCADE_ROWS
from gpu.state.view import StepView
from gpu.step.steps import PaddedSizes
from tests.rigs import drafters, tiny_model
from tests.rigs.attention import EagerAttention
from tests.rigs.draft_jobs import Engines, engines_of, jobs, same
from tests.rigs.drafting import PAGE, ROWS, SAMPLES, STEP_TOKENS, Drafts
from tests.rigs.graph_runner import captured_machine
from tests.rigs.runner import CPU, Rig

KINDS = ("penalties", "min_tokens", "hidden", "grammar")
TOKENS, PROMPT = 11, 13
DEPTH = 3


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with engines_of(tiny_model.build("llama", tmp_path_factory.mktemp("llama")).path) as made:
        yield made


def some_jobs() -> list[Job]:
    """Jobs with few tokens: the interpreter takes a tenth of a second for a step of twenty."""
    return [
        msgspec.structs.replace(job, prompt=job.prompt[: PROMPT - at], max_tokens=TOKENS)
        for at, job in enumerate(job for job in jobs() if job.id in KINDS)
    ]


def attention(rig: Rig) -> AttentionBackend:
    """Triton's, as a GPU's."""
    config = attention_config(rig.spec, PAGE, SAMPLES, torch.float32, CPU, CudaFacts("", "", (9, 0), 2))
    return device_attention(config._replace(pdl=False, cascade_rows=CASCADE_ROWS, query=1 + DEPTH), "triton")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the rig's model is on a CPU: the interpreter's")
@pytest.mark.parametrize("trees", [False, True])
async def test_a_gpus_kernels_verify_drafts(engines: Engines, trees: bool) -> None:
    kinds = some_jobs()
    plain = await engines.plain(kinds)
    sizes = PaddedSizes(SAMPLES, STEP_TOKENS, ROWS, DEPTH)
    engine = engines.make(
        Drafts(DEPTH, 0.9, trees=trees), 1, lambda rig: captured_machine(rig, sizes, attention=attention(rig))
    )
    for answer in await engine.answers(kinds):
        same(answer, plain[answer.run.id], 1e-3)
    assert max(engine.runner.most.values()) >= 1 + DEPTH - trees
    assert 1 + DEPTH in {sizes.forward(plan).query for plan in engine.runner.plans}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the rig's model is on a CPU: the interpreter's")
async def test_a_gpus_kernels_verify_drafts_of_a_hybrid(tmp_path: Path) -> None:
    """States behind accepted drafts, in steps of several sizes."""
    kinds = ["linear_attention", "full_attention"]
    made = tiny_model.build("qwen3.5", tmp_path, num_hidden_layers=2, layer_types=kinds)
    sizes = PaddedSizes(SAMPLES, STEP_TOKENS, ROWS, DEPTH)
    with engines_of(made.path) as hybrid:
        plain = await hybrid.plain(some_jobs())
        engine = hybrid.make(Drafts(DEPTH, 0.8), 1, lambda rig: captured_machine(rig, sizes))
        for answer in await engine.answers(some_jobs()):
            same(answer, plain[answer.run.id], 1e-3)
    assert max(engine.runner.most.values()) == 1 + DEPTH


@pytest.mark.skipif(torch.cuda.is_available(), reason="the rig's model is on a CPU: the interpreter's")
async def test_hidden_states_of_accepted_paths(tmp_path: Path) -> None:
    """Drafts are trees, beside prompts, and the drafter reads the states behind the last norm: hidden states
    of a prompt's step are taken before accepted paths are moved."""
    kinds = [
        Job(
            id=f"{kind} {at}", prompt=np.array([5, 100 + at, *range(9, 18 + at)], np.int32), seed=at,
            sampling=SamplingParams(temperature=0.0, hidden=kind), max_tokens=20, ignore_eos=True,
        )
        for at, kind in enumerate(("all", "output") * 4)
    ]  # fmt: skip
    sizes = PaddedSizes(SAMPLES, STEP_TOKENS, ROWS, 7)
    with engines_of(tiny_model.build("llama", tmp_path).path) as made:
        plain = await made.plain(kinds)
        engine = made.make(
            Drafts(7, 0.9, trees=True), 1, lambda rig: captured_machine(rig, sizes, attention=attention(rig))
        )
        engine.runner._runner._buffers.keep_aux((), STEP_TOKENS)
        for answer in await engine.answers(kinds):
            same(answer, plain[answer.run.id], 1e-3)


def gpus_machine(spec: ModelSpec) -> DraftMachine:
    """How a GPU runs a head."""
    attention = EagerAttention((), [spec.window(layer) for layer in range(spec.layers)])

    def ops(pool: KvPool) -> Callable[[StepView], TritonOps]:
        return lambda view: TritonOps(view, Kernels(attention, pool.caches(), None))

    return drafters.cpu_machine(spec)._replace(attention=attention, ops=ops, kernels=draft_kernels)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the rig's model is on a CPU: the interpreter's")
@pytest.mark.parametrize(("name", "tree"), [("eagle3", None), ("eagle", Tree(2, 2, 4))], ids=str)
async def test_a_gpus_kernels_draft(engines: Engines, tmp_path: Path, name: str, tree: Tree | None) -> None:
    """The same drafts as a CPU's, of which as many are accepted, and they change no text."""
    kinds = some_jobs()
    plain = await engines.plain(kinds)
    depth = tree.nodes if tree else 2
    sizes = PaddedSizes(SAMPLES, STEP_TOKENS, ROWS, depth)
    found = []
    for machine in (gpus_machine, drafters.cpu_machine):
        make = drafters.head(name, tmp_path, machine, tree=tree)
        drafts = Drafts(depth, 0.0, make, trees=tree is not None)
        if machine is gpus_machine:
            engine = engines.make(drafts, 0, lambda rig: captured_machine(rig, sizes))
        else:
            engine = engines.make(drafts, 0)
        answers = await engine.answers(kinds)
        for answer in answers:
            same(answer, plain[answer.run.id], 1e-3)
        found.append({answer.run.id: answer.run.drafts(0) for answer in answers})
    assert found[0] == found[1]
    assert any(counts and counts.accepted for counts in found[0].values())
