"""Parity with transformers: the same logits and the same text, whatever the plan looked like."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.plan import Chunk, Save
from core.request import SamplingParams
from tests.rigs import tiny_model
from tests.rigs.arrays import ints
from tests.rigs.driver import serve
from tests.rigs.runner import Rig
from tests.rigs.tiny_model import Tiny

A = [int(i * 37 % 251) + 3 for i in range(40)]
B = [int(i * 53 % 241) + 5 for i in range(23)]
C = [*A[:32], 9, 8, 7, 6, 5]
TOKENS = 64
"""Texts of 104: longer than every window and every length that positions were trained for."""

FAMILIES = [
    *(
        "gemma2",
        "gemma3",
        "mixtral",
        "phi3",
        "gpt-oss",
        "deepseek-v2",
        "deepseek-v3",
        "glm4-moe",
        "granite",
        "olmo2",
    ),
    *("olmo3", "smollm3", "qwen2-moe", "qwen3-next", "qwen3.5", "qwen3.5-moe", "cohere2", "gpt2"),
]
"""One variant of each family, and two through transformers."""


@pytest.fixture(scope="module", params=[*sorted(tiny_model.VARIANTS), *tiny_model.UNLISTED])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return tiny_model.build(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def texts(tiny: Tiny) -> list[list[int]]:
    return [tiny_model.greedy(tiny.reference, prompt, TOKENS) for prompt in (A, B, C)]


@pytest.mark.parametrize(("page_size", "consecutive"), [(1, False), (16, False), (16, True)])
def test_greedy_text_is_that_of_transformers(
    tiny: Tiny, texts: list[list[int]], page_size: int, consecutive: bool
) -> None:
    rig = Rig(tiny.path, page_size, consecutive=consecutive)
    outs: dict[int, list[int]] = {1: [], 2: [], 3: []}
    # A in two chunks that cut a page; B joins the second; C stands on A's first 32 tokens, whose states are
    # saved within the second chunk.
    rig.step(chunks=[Chunk(1, 0, ints(A[:17]), False)], new=[rig.new(1, A)])
    chunks = [Chunk(1, 17, ints(A[17:]), True), Chunk(2, 0, ints(B), True)]
    two = rig.step(chunks=chunks, new=[rig.new(2, B)], saves=[Save(1, 32, 3)])
    outs[1].append(int(two.tokens[0]))
    outs[2].append(int(two.tokens[1]))
    new = rig.new(3, C, shared=rig.pages[1][: 32 // page_size], checkpoint=3)
    three = rig.step(decode=[2, 1], chunks=[Chunk(3, 32, ints(C[32:]), True)], new=[new])
    for slot, token in zip((2, 1, 3), three.tokens.tolist(), strict=True):
        outs[slot].append(token)
    while rows := [slot for slot, out in outs.items() if len(out) < TOKENS]:
        for slot, token in zip(rows, rig.step(decode=rows).tokens.tolist(), strict=True):
            outs[slot].append(token)
    assert [outs[1], outs[2], outs[3]] == texts


def test_logits_are_those_of_transformers(tiny: Tiny, texts: list[list[int]]) -> None:
    if rope_depends_on_the_batch(tiny):
        pytest.skip("transformers rotates all of a long prompt by its last position; the text is compared")
    sequence = A + texts[0][:24]
    want = tiny_model.logits(tiny.reference, sequence)
    rig = Rig(tiny.path)
    rig.step(chunks=[Chunk(1, 0, ints(A[:9]), False)], new=[rig.new(1, A)])
    rig.step(chunks=[Chunk(1, 9, ints(A[9:]), True)])
    got = [rig.watched.seen[0]]
    for _ in texts[0][:24]:
        rig.step(decode=[1])
        got.append(rig.watched.seen[0])
    torch.testing.assert_close(torch.stack(got), want[len(A) - 1 :], atol=1e-4, rtol=0)


def rope_depends_on_the_batch(tiny: Tiny) -> bool:
    rope = getattr(tiny.reference.config, "rope_parameters", None) or {}
    return rope.get("rope_type") == "dynamic"


@pytest.mark.parametrize("family", FAMILIES)
def test_preempted_requests_have_the_text_of_transformers(family: str, tmp_path: Path) -> None:
    """Four requests run with pages for two of them, and then once more with cached prefixes."""
    tiny = tiny_model.build(family, tmp_path)
    prompts = [A, B, C, B[::-1]]
    want = [tiny_model.greedy(tiny.reference, prompt, TOKENS) for prompt in prompts]
    driver = serve(tiny.path, "--kv-tokens 256")
    try:
        params = [SamplingParams(temperature=0.0, max_tokens=TOKENS)] * len(prompts)
        for _ in range(2):
            assert [answer.tokens for answer in driver.run(prompts, params)] == want
        counters = driver.scheduler.counters
        assert counters.retractions and counters.cached_tokens
    finally:
        driver.close()
