"""Steps as plans describe them: cells, lengths, who samples, prompt log-probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from core.plan import Chunk, PromptLogprobs
from core.request import SamplingParams
from gpu.thread import device_thread
from tests.rigs import tiny_model
from tests.rigs.arrays import ints
from tests.rigs.runner import CPU, Rig
from tests.rigs.tiny_model import Tiny

PROMPT = [int(i * 31 % 250) + 2 for i in range(30)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return tiny_model.build("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def rig(tiny: Tiny) -> Rig:
    return Rig(tiny.path)


def test_results_follow_plan_order_and_are_frozen(rig: Rig) -> None:
    rig.step(chunks=[Chunk(2, 0, ints(PROMPT), True)], new=[rig.new(2, PROMPT)])
    mixed = rig.plan(
        decode=[2],
        chunks=[Chunk(1, 0, ints(PROMPT[:5]), False), Chunk(3, 0, ints(PROMPT), True)],
        new=[rig.new(1, PROMPT), rig.new(3, PROMPT)],
    )
    with device_thread(CPU):
        result = rig.runner.launch(mixed).wait()
    assert result.step == mixed.step
    assert result.tokens.dtype == np.int32 and len(result.tokens) == mixed.num_samples == 2
    assert not result.tokens.flags.writeable
    assert result.seconds > 0
    cells = rig.slots.last_token.tolist()
    assert [cells[2], cells[3]] == result.tokens.tolist()
    assert rig.slots.length.tolist() == [0, 0, 31, 30, 0]  # the first prompt has no token yet


def test_a_slot_starts_anew(rig: Rig) -> None:
    first = rig.generate(1, PROMPT, 6)
    rig.generate(1, PROMPT[::-1], 3)
    assert rig.generate(1, PROMPT, 6) == first


def test_rows_do_not_touch_each_other(rig: Rig) -> None:
    alone = rig.generate(1, PROMPT, 10)
    rows = {1: PROMPT, 2: PROMPT[3:], 4: PROMPT[:2]}
    for slot, prompt in rows.items():
        rig.step(chunks=[Chunk(slot, 0, ints(prompt), True)], new=[rig.new(slot, prompt)])
    out = [int(rig.slots.last_token[1])]
    out += [int(rig.step(decode=[4, 1, 2]).tokens[1]) for _ in range(9)]
    assert out == alone


def test_a_step_that_samples_nothing_has_no_tokens(rig: Rig) -> None:
    result = rig.step(chunks=[Chunk(1, 0, ints(PROMPT), False)], new=[rig.new(1, PROMPT)])
    assert result.tokens.shape == (0,)
    assert result.logprobs == {}


def test_a_row_that_is_not_finite_says_so_and_may_run_on(rig: Rig) -> None:
    with device_thread(CPU):
        rig.places["model.embed_tokens.weight"][7] = float("nan")
    bad, good = [7, 3, 4], [5, 6, 8]
    result = rig.step(
        chunks=[Chunk(1, 0, ints(bad), True), Chunk(2, 0, ints(good), True)],
        new=[rig.new(1, bad), rig.new(2, good)],
    )
    assert result.tokens[0] == -1 and result.tokens[1] >= 0
    again = rig.step(decode=[1, 2])
    assert again.tokens[0] == -1 and again.tokens[1] >= 0


def test_a_thread_must_have_entered(rig: Rig) -> None:
    plan = rig.plan(chunks=[Chunk(1, 0, ints(PROMPT), True)], new=[rig.new(1, PROMPT)])
    with pytest.raises(RuntimeError, match="device_thread"):
        rig.runner.launch(plan)


def scores(tiny: Tiny) -> torch.Tensor:
    """transformers' log P(token at p | before), at index p; index 0 is unused."""
    raw = tiny_model.logits(tiny.reference, PROMPT).log_softmax(-1)
    return torch.cat([torch.zeros(1), raw[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]])


@pytest.mark.parametrize("cuts", [[30], [1, 30], [7, 8, 29, 30]])
@pytest.mark.parametrize("start", [0, 1, 8, 29])
def test_prompt_logprobs_in_chunks(
    tiny: Tiny, rig: Rig, cuts: list[int], start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu.prompt.POSITIONS", 6)
    new = [rig.new(1, PROMPT)]
    told: list[PromptLogprobs] = []
    at = 0
    for cut in cuts:
        target = PROMPT[cut] if cut < len(PROMPT) else -1
        chunk = Chunk(1, at, ints(PROMPT[at:cut]), cut == 30, logprobs=2, logprobs_start=start, target=target)
        found = rig.step(chunks=[chunk], new=new).prompt_logprobs
        assert set(found) <= {1}
        told += found.values()
        new, at = [], cut
    places = [p for each in told for p in range(each.start, each.start + len(each.values))]
    assert places == list(range(max(start, 1), 30))
    values = np.concatenate([each.values for each in told])
    np.testing.assert_allclose(values, scores(tiny)[max(start, 1) :], atol=1e-4)
    assert all(each.top_ids.shape == (len(each.values), 2) for each in told)


def test_only_the_chunk_that_asks_is_scored(rig: Rig) -> None:
    asks = Chunk(2, 0, ints(PROMPT), True, logprobs=0, logprob_ids=(7, 3))
    result = rig.step(
        chunks=[Chunk(1, 0, ints(PROMPT), True), asks], new=[rig.new(1, PROMPT), rig.new(2, PROMPT)]
    )
    assert {slot: (told.start, len(told.values)) for slot, told in result.prompt_logprobs.items()} == {
        2: (1, 29)
    }
    assert result.prompt_logprobs[2].top_ids.tolist() == [[7, 3]] * 29


def test_sampling_does_not_depend_on_the_batch(rig: Rig) -> None:
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=9)

    def story(slot: int, others: list[int]) -> list[int]:
        rig.step(chunks=[Chunk(slot, 0, ints(PROMPT), True)], new=[rig.new(slot, PROMPT, params=params)])
        out = [int(rig.slots.last_token[slot])]
        return out + [int(rig.step(decode=[*others, slot]).tokens[-1]) for _ in range(8)]

    alone = story(1, [])
    assert story(3, [1]) == alone
