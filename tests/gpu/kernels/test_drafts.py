"""Rows of several tokens through a GPU's kernels, in padded sizes: the answers of a CPU without drafts."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import torch

from app.helper.process import HelperProcess
from app.text.tokenizer import Tokenizer
from gpu.attention import AttentionBackend
from gpu.attention.backend import attention_config
from gpu.attention.selector import device_attention
from gpu.device import CudaFacts
from gpu.grammar import Compiler
from gpu.state.entry import CASCADE_ROWS
from gpu.step.steps import PaddedSizes
from tests.rigs import tiny_model
from tests.rigs.draft_jobs import STOP, Engines, jobs, same
from tests.rigs.drafting import PAGE, ROWS, SAMPLES, STEP_TOKENS, Drafts
from tests.rigs.graph_runner import captured_machine
from tests.rigs.runner import CPU, Rig
from tests.rigs.tiny_model import VOCAB

KINDS = ("penalties", "min_tokens", "hidden", "grammar")
TOKENS = 11
DEPTH = 3


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    tokenizer = Tokenizer.load(None, VOCAB, [STOP])
    compiler = Compiler(tokenizer.token_table(VOCAB), HelperProcess())
    yield Engines(tiny_model.build("llama", tmp_path_factory.mktemp("llama")).path, tokenizer, compiler)
    compiler.close()


def attention(rig: Rig) -> AttentionBackend:
    """Triton's, as a GPU's."""
    config = attention_config(rig.spec, PAGE, SAMPLES, torch.float32, CPU, CudaFacts("", "", (9, 0), 2))
    return device_attention(config._replace(pdl=False, cascade_rows=CASCADE_ROWS, query=1 + DEPTH), "triton")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the rig's model is on a CPU: the interpreter's")
async def test_a_gpus_kernels_verify_drafts(engines: Engines) -> None:
    """Few tokens: the interpreter takes a tenth of a second for a step."""
    kinds = [msgspec.structs.replace(job, max_tokens=TOKENS) for job in jobs() if job.id in KINDS]
    plain = await engines.plain(kinds)
    sizes = PaddedSizes(SAMPLES, STEP_TOKENS, ROWS, DEPTH)
    engine = engines.make(
        Drafts(DEPTH, 0.9), 1, lambda rig: captured_machine(rig, sizes, attention=attention(rig))
    )
    for answer in await engine.answers(kinds):
        same(answer, plain[answer.run.id], 1e-3)
    assert max(engine.runner.most.values()) == 1 + DEPTH
    assert 1 + DEPTH in {sizes.forward(plan).query for plan in engine.runner.plans}
