"""Routed experts are those that transformers' routers choose, whatever the plan looked like."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from core.plan import Chunk
from core.request import SamplingParams
from tests.rigs import tiny_model
from tests.rigs.arrays import ints
from tests.rigs.runner import Rig
from tests.rigs.tiny_model import Tiny

A = [int(i * 37 % 251) + 3 for i in range(30)]
B = [int(i * 53 % 241) + 5 for i in range(17)]
MODELS = ["qwen3-moe", "qwen3-moe-mixed", "gpt-oss"]
ASKED = SamplingParams(temperature=0.0, experts_from=0)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Tiny] = {}

    def build(name: str) -> Tiny:
        if name not in made:
            made[name] = tiny_model.build(name, tmp_path_factory.mktemp(name))
        return made[name]

    return build


@torch.no_grad()
def reference(tiny: Tiny, tokens: list[int], spec: Any) -> np.ndarray:
    """int32 [n, layers, k]: the best of each router's logits, zeros in layers without a router."""
    out = tiny.reference(torch.tensor([tokens]), output_router_logits=True)
    found = np.zeros((len(tokens), spec.layers, spec.moe.per_token), np.int32)
    routers = [logits for logits in out.router_logits if logits is not None]
    for layer, logits in zip(sorted(spec.moe.layers), routers, strict=True):
        found[:, layer] = logits.softmax(-1).topk(spec.moe.per_token, dim=-1).indices.numpy()
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cuts", [[30], [4, 21, 30]])
def test_prompt_and_output(built: Any, name: str, cuts: list[int]) -> None:
    tiny = built(name)
    rig = Rig(tiny.path)
    new, start, got = [rig.new(1, A, params=ASKED), rig.new(2, B)], 0, []
    others: set[int] = set()
    for cut in cuts:
        chunks = [Chunk(1, start, ints(A[start:cut]), cut == 30, experts=True)]
        if start == 0:
            chunks.insert(0, Chunk(2, 0, ints(B), True))
        result = rig.step(chunks=chunks, new=new)
        got.append(result.experts[1])
        others |= set(result.experts) - {1}
        assert not result.hidden
        new, start = [], cut
    tokens = [int(result.tokens[-1])]
    for _ in range(5):
        result = rig.step(decode=[2, 1])
        got.append(result.experts[1])
        others |= set(result.experts) - {1}
        tokens.append(int(result.tokens[1]))
    assert not others, "nobody else asked"
    assert all(each.dtype == np.int32 and not each.flags.writeable for each in got)
    np.testing.assert_array_equal(np.concatenate(got), reference(tiny, A + tokens[:-1], rig.spec))


def test_only_what_is_owed_is_given(built: Any) -> None:
    tiny = built("qwen3-moe")
    rig = Rig(tiny.path)
    chunk = Chunk(1, 0, ints(A), False, hidden="all", hidden_start=12, experts=True)
    result = rig.step(chunks=[chunk], new=[rig.new(1, A)])
    np.testing.assert_array_equal(result.experts[1], reference(tiny, A, rig.spec)[12:])
    assert len(result.hidden[1]) == 18


def test_a_slot_forgets_who_asked(built: Any) -> None:
    tiny = built("qwen3-moe")
    rig = Rig(tiny.path)
    asked = rig.new(1, A, params=ASKED)
    assert rig.step(chunks=[Chunk(1, 0, ints(A), True, experts=True)], new=[asked]).experts
    result = rig.step(chunks=[Chunk(1, 0, ints(B), True)], new=[rig.new(1, B)])
    assert not result.experts and not rig.step(decode=[1]).experts
