"""Experts from the steps to a run: those of its own tokens, to the last that the model read."""

from __future__ import annotations

import numpy as np
import pytest

from app.api.request.experts import experts
from app.engine.job import TextOptions
from app.text.tokenizer import Tokenizer
from core.errors import RequestError
from core.request import SamplingParams
from core.types import FinishReason
from tests.rigs.executor import oracle
from tests.rigs.step_loop import PROMPT, VOCAB, Bench
from tests.rigs.wait import settle

ASKED = SamplingParams(temperature=0.0, experts_from=1)


def wanted(tokens: list[int]) -> bytes:
    """The fake device's: a token and its position, in one layer."""
    read = [*PROMPT.tolist(), *tokens[:-1]]
    return np.array([(token, at) for at, token in enumerate(read)][1:], np.int32).tobytes()


async def test_each_choice_has_its_own(bench: Bench) -> None:
    run = await bench.start("a", 6, n=2, sampling=ASKED)
    other = await bench.start("b", 6)
    await run.wait()
    await other.wait()
    await settle()
    for index in range(2):
        tokens = bench.tokens(f"a-{index}")
        assert experts(run, index, len(tokens)) == wanted(tokens)
    assert experts(other, 0, 1) is None


async def test_a_stop_string_leaves_none_of_what_ran_ahead(bench: Bench, tokenizer: Tokenizer) -> None:
    stop = tokenizer.decode(oracle(PROMPT.tolist(), 40, VOCAB))[10:13]
    run = await bench.start("a", 40, sampling=ASKED, text=TextOptions(stop=(stop,)))
    await run.wait()
    await settle()
    assert bench.reason("a-0") is FinishReason.STOP
    tokens = bench.tokens("a-0")
    assert experts(run, 0, len(tokens)) == wanted(tokens)


@pytest.mark.parametrize(
    ("params", "param"),
    [
        (SamplingParams(experts_from=len(PROMPT) + 1), "routed_experts_start_len"),
        (SamplingParams(support=True), "return_sampling_mask"),
    ],
)
async def test_what_cannot_be_is_refused_before_anything_is_queued(
    bench: Bench, params: SamplingParams, param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        await bench.start("a", 4, sampling=params)
    assert caught.value.param == param
    assert bench.submitter.idle and not bench.executor.plans


async def test_the_start_may_be_the_end_of_the_prompt(bench: Bench) -> None:
    run = await bench.start("a", 3, sampling=SamplingParams(temperature=0.0, experts_from=len(PROMPT)))
    await run.wait()
    await settle()
    assert experts(run, 0, 3) == wanted(bench.tokens("a-0"))[(len(PROMPT) - 1) * 8 :]
