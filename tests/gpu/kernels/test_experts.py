"""Reported experts are those that the kernels run, ties and all; and reports on tokens come from the plain
launches of a captured step as from the plain runner."""

from __future__ import annotations

import pytest
import torch

from core.plan import Chunk
from core.request import SamplingParams
from gpu.experts import PLAIN, Choice, Experts
from gpu.kernels.moe.route import route
from gpu.ops.fused import TritonOps
from tests.rigs import tiny_model
from tests.rigs.arrays import ints
from tests.rigs.graph_runner import PROMPT, Both

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's")


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("rows", "experts", "top_k", "choice"),
    [(3, 128, 8, PLAIN), (40, 20, 3, PLAIN), (40, 20, 3, Choice(True, torch.zeros(20), 5, 2))],
)
def test_routes_are_the_kernels(
    rows: int, experts: int, top_k: int, choice: Choice, kind: torch.dtype, device: torch.device
) -> None:
    if choice.bias is not None:
        choice = choice._replace(bias=choice.bias.to(device))
    logits = (torch.randn(rows, experts, device=device) * 4).round().to(kind)  # most rows have ties
    ran = route(logits, top_k, 16, choice=choice)[0].experts
    weights = torch.empty(0, device=device)
    ops = TritonOps.__new__(TritonOps)  # what it chooses depends on no step
    told = ops.routes(logits, Experts(weights, weights, top_k, choice=choice))
    assert told.tolist() == ran.tolist()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    return Both(tiny_model.build("qwen3-moe-mixed", tmp_path_factory.mktemp("moe")).path)


@without_gpu
def test_experts_of_prompts_and_rows(both: Both) -> None:
    """Steps that nobody asks of are the captured ones, before and between."""
    rig, asked = both.rig, SamplingParams(temperature=0.0, experts_from=3)
    new = [rig.new(1, PROMPT), rig.new(2, PROMPT[3:], params=asked)]
    got = both.step(chunks=[Chunk(1, 0, ints(PROMPT), True)], new=new[:1])
    assert not got.experts
    first = Chunk(2, 0, ints(PROMPT[3:12]), False, hidden_start=3, experts=True)
    got = both.step(decode=[1], chunks=[first], new=new[1:])
    assert got.experts[2].shape == (6, rig.spec.layers, rig.spec.moe.per_token)
    got = both.step(decode=[1], chunks=[Chunk(2, 9, ints(PROMPT[12:]), True, experts=True)])
    assert len(got.experts[2]) == len(PROMPT) - 12
    assert both.step(decode=[1, 2]).experts.keys() == {2}
    assert not both.step(decode=[1]).experts


@without_gpu
def test_entropies_and_masks(both: Both) -> None:
    rig = both.rig
    asked = [
        SamplingParams(temperature=0.8, top_k=9, top_p=0.9, support=True, seed=5),
        SamplingParams(temperature=0.0, entropy=True, support=True),
        SamplingParams(temperature=1.0, seed=3),
    ]
    new = [rig.new(slot, PROMPT[slot:], params=each) for slot, each in enumerate(asked, 1)]
    first = both.step(chunks=[Chunk(n.slot, 0, n.prompt, True) for n in new], new=new)
    for got in (first, both.step(decode=[1, 2, 3])):
        assert got.logprobs.keys() == {0, 1}
        assert got.logprobs[0].support is not None and got.logprobs[0].entropy is None
        assert got.logprobs[1].support is not None and (got.logprobs[1].entropy or 0.0) > 0.0
