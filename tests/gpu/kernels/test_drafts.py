"""Rows of several tokens through a GPU's kernels, in padded sizes: the answers of a CPU without drafts."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import torch

from app.helper.process import HelperProcess
from app.text.tokenizer import Tokenizer
from gpu.grammar import Compiler
from gpu.step.steps import PaddedSizes
from tests.rigs import tiny_model
from tests.rigs.draft_jobs import STOP, Engines, jobs, same
from tests.rigs.drafting import ROWS, SAMPLES, STEP_TOKENS, Drafts
from tests.rigs.graph_runner import captured_machine
from tests.rigs.tiny_model import VOCAB

KINDS = ("penalties", "min_tokens", "hidden", "grammar")
TOKENS = 11


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    tokenizer = Tokenizer.load(None, VOCAB, [STOP])
    compiler = Compiler(tokenizer.token_table(VOCAB), HelperProcess())
    yield Engines(tiny_model.build("llama", tmp_path_factory.mktemp("llama")).path, tokenizer, compiler)
    compiler.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the rig's model is on a CPU: the interpreter's")
async def test_a_gpus_kernels_verify_drafts(engines: Engines) -> None:
    """Few tokens: the interpreter takes a tenth of a second for a step."""
    kinds = [msgspec.structs.replace(job, max_tokens=TOKENS) for job in jobs() if job.id in KINDS]
    plain = await engines.plain(kinds)
    sizes = PaddedSizes(SAMPLES, STEP_TOKENS, ROWS)
    engine = engines.make(Drafts(3, 0.9), 1, lambda rig: captured_machine(rig, sizes))
    for answer in await engine.answers(kinds):
        same(answer, plain[answer.run.id], 1e-3)
    assert max(engine.runner.most.values()) == 4
