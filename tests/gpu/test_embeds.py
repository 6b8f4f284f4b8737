"""Prompts of embeddings: rows of the model's own table say what the ids say, however they are cut, and
what was sent as embeddings is known to nobody else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from core.config import ScheduleConfig
from core.executor import Capabilities
from core.plan import Chunk
from core.request import SamplingParams
from core.types import Floats
from gpu.executor import LocalExecutor
from tests.rigs import tiny_model
from tests.rigs.arrays import ints
from tests.rigs.driver import Driver
from tests.rigs.runner import Rig
from tests.rigs.tiny_model import Tiny

A = [int(i * 37 % 251) + 3 for i in range(40)]
B = [int(i * 53 % 241) + 5 for i in range(23)]
C = [*A[:32], 9, 8, 7, 6, 5]
FAMILIES = ("llama-tied-bias", "gemma2", "mistral", "qwen2", "qwen3-moe", "cohere2")


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return tiny_model.build(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return tiny_model.build("llama", tmp_path_factory.mktemp("llama"))


def table(tiny: Tiny) -> Floats:
    """The model's own embeddings, scaled where a family scales what its table gives."""
    every = torch.arange(tiny_model.VOCAB)
    rows: Floats = tiny.reference.get_input_embeddings()(every).detach().numpy().copy()
    rows.setflags(write=False)
    return rows


def greedy(tokens: int, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, **more)  # type: ignore[arg-type]


class Engine:
    """The real scheduler over the plain runner; steps of 24 tokens, so that prompts are cut."""

    def __init__(self, tiny: Tiny, tokens: int = 512, depth: int = 1) -> None:
        rig = Rig(tiny.path, page_size=4, rows=4, tokens=tokens)
        capabilities = Capabilities(
            num_pages=tokens // 4 + 1, page_size=4, max_rows=4, context_length=256,
            vocab_size=rig.spec.vocab_size, max_step_tokens=24,
        )  # fmt: skip
        config = ScheduleConfig(overlap_depth=depth, conservativeness=0.01, prefill_weight=0.0)
        self.driver = Driver(LocalExecutor([rig.runner], capabilities), config)

    def texts(
        self, prompts: Sequence[Sequence[int] | Floats], params: Sequence[SamplingParams]
    ) -> list[list[int]]:
        return [answer.tokens for answer in self.driver.run(prompts, params)]


def test_a_row_is_its_embedding_whatever_its_id(tiny: Tiny) -> None:
    """By hand: a chunk that is cut, beside a decode row and a chunk of ids."""
    own = table(tiny)
    rig = Rig(tiny.path)
    want = {1: rig.generate(1, A, 6), 2: rig.generate(2, B, 6), 3: rig.generate(3, C, 6)}
    blank = ints([0] * len(A))
    out = {slot: list[int]() for slot in want}
    first = rig.step(chunks=[Chunk(2, 0, ints(B), True)], new=[rig.new(2, B)])
    out[2].append(int(first.tokens[0]))
    cut = Chunk(1, 0, blank[:17], False, embeds=own[A[:17]])
    out[2].append(int(rig.step(decode=[2], chunks=[cut], new=[rig.new(1, A)]).tokens[0]))
    rest = Chunk(1, 17, blank[17:], True, embeds=own[A[17:]])
    tokens = rig.step(decode=[2], chunks=[Chunk(3, 0, ints(C), True), rest], new=[rig.new(3, C)]).tokens
    for slot, token in zip((2, 3, 1), tokens.tolist(), strict=True):
        out[slot].append(token)
    while rows := [slot for slot, found in out.items() if len(found) < 6]:
        for slot, token in zip(rows, rig.step(decode=rows).tokens.tolist(), strict=True):
            out[slot].append(token)
    assert out == want


def test_ids_may_follow_embeddings(llama: Tiny) -> None:
    """After a retraction the output is known by its ids."""
    rig = Rig(llama.path)
    want = rig.generate(1, A, 4)
    ids = [*[0] * 30, *A[30:]]
    chunk = Chunk(2, 0, ints(ids), True, embeds=table(llama)[A[:30]])
    out = [int(rig.step(chunks=[chunk], new=[rig.new(2, ids)]).tokens[0])]
    out += [int(rig.step(decode=[2]).tokens[0]) for _ in range(3)]
    assert out == want


def test_the_scheduler_cuts_them(tiny: Tiny) -> None:
    engine, own = Engine(tiny), table(tiny)
    params = [greedy(12)] * 3
    want = engine.texts([A, B, C], params)
    got = engine.texts([own[A], own[B], own[C]], params)
    mixed = engine.texts([own[A], B, own[C]], params)
    engine.driver.close()
    assert got == mixed == want


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_they_survive_retraction(llama: Tiny, depth: int) -> None:
    own, params = table(llama), [greedy(40, seed=i) for i in range(3)]
    roomy = Engine(llama)
    want = roomy.texts([A, B, C], params)
    roomy.driver.close()
    tight = Engine(llama, tokens=140, depth=depth)
    got = tight.texts([own[A], own[B], own[C]], params)
    retractions = tight.driver.scheduler.counters.retractions
    tight.driver.close()
    assert retractions > 0
    assert got == want


def test_nobody_finds_their_pages(llama: Tiny) -> None:
    """All placeholders are alike, and so are the ids that a client may send."""
    engine, own = Engine(llama), table(llama)
    prompts = [own[A], own[A[::-1]], [0] * len(A)]
    together = engine.texts(prompts, [greedy(8)] * 3)
    cached = engine.driver.scheduler.counters.cached_tokens
    engine.driver.close()
    alone = []
    for prompt in (A, A[::-1], [0] * len(A)):
        engine = Engine(llama)
        alone += engine.texts([prompt], [greedy(8)])
        engine.driver.close()
    assert together == alone
    assert cached == 0


def test_penalties_know_no_placeholder(llama: Tiny) -> None:
    """Token 0 is the favourite, and is said once: the prompt's zeros are no tokens."""
    engine, own = Engine(llama), table(llama)
    (said,) = engine.texts([own[A]], [greedy(2, repetition_penalty=100.0, logit_bias=((0, 90.0),))])
    engine.driver.close()
    assert said[0] == 0 and said[1] != 0


def test_min_tokens_count_from_the_prompt_s_end(llama: Tiny) -> None:
    engine, own = Engine(llama), table(llama)
    (free,) = engine.texts([own[A]], [greedy(8)])
    params = greedy(8, min_tokens=4, stop_ids=frozenset(free))
    told, asked = engine.texts([A, own[A]], [params, params])
    engine.driver.close()
    assert told == asked and len(asked) > 4


def test_numbers_that_are_too_large_end_their_row_alone(llama: Tiny) -> None:
    engine, own = Engine(llama), table(llama)
    wild = np.full_like(own[B], 3e38)
    (want,) = engine.texts([A], [greedy(8)])
    got = engine.texts([own[A], wild], [greedy(8), greedy(8)])
    engine.driver.close()
    assert got[0] == want
