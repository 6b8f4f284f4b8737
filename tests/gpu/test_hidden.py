"""Vectors and scores are those of transformers, whatever the plan looked like."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from core.plan import Chunk
from core.request import SamplingParams
from core.request.params import Hidden
from tests.rigs import tiny_model
from tests.rigs.arrays import ints
from tests.rigs.runner import Rig
from tests.rigs.tiny_model import HEADLESS, Tiny

A = [int(i * 37 % 251) + 3 for i in range(30)]
B = [int(i * 53 % 241) + 5 for i in range(17)]
C = [int(i * 29 % 239) + 4 for i in range(30)]

ENCODERS = sorted(name for name in HEADLESS if "Bert" in name or "Roberta" in name)
DECODERS = sorted(set(HEADLESS) - set(ENCODERS))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Tiny] = {}

    def build(name: str) -> Tiny:
        if name not in made:
            make = tiny_model.build_headless if name in HEADLESS else tiny_model.build
            made[name] = make(name, tmp_path_factory.mktemp(name))
        return made[name]

    return build


@torch.no_grad()
def reference(tiny: Tiny, tokens: list[int], **more: list[int]) -> torch.Tensor:
    """[n, hidden] of a base model, [1, classes] of a classifier."""
    out = tiny.reference(torch.tensor([tokens]), **{name: torch.tensor([v]) for name, v in more.items()})
    return out.logits if hasattr(out, "logits") else out.last_hidden_state[0]


def close(got: np.ndarray, want: torch.Tensor) -> None:
    np.testing.assert_allclose(got, want.numpy(), atol=2e-4)


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_read_whole_texts_side_by_side(built: Any, name: str) -> None:
    tiny = built(name)
    rig = Rig(tiny.path)
    scores = "Classification" in name
    asked: Hidden = "first" if scores else "all"
    prompts = {1: A, 2: B, 3: C}
    result = rig.step(
        chunks=[Chunk(slot, 0, ints(p), False, hidden=asked) for slot, p in prompts.items()],
        new=[rig.new(slot, p) for slot, p in prompts.items()],
    )
    assert set(result.hidden) == {1, 2, 3} and not result.hidden[1].flags.writeable
    for slot, prompt in prompts.items():
        close(result.hidden[slot], reference(tiny, prompt))


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "BertModel", "XLMRobertaModel"])
def test_the_second_text_of_a_pair_is_another_segment(built: Any, name: str) -> None:
    """A model with one kind of segment takes no notice."""
    tiny = built(name)
    rig = Rig(tiny.path)
    asked: Hidden = "first" if "Classification" in name else "all"
    chunks = [Chunk(1, 0, ints(A), False, hidden=asked), Chunk(2, 0, ints(A), False, hidden=asked, pair=11)]
    result = rig.step(chunks=chunks, new=[rig.new(1, A), rig.new(2, A)])
    types = [0] * 11 + [1] * 19
    close(result.hidden[1], reference(tiny, A))
    close(result.hidden[2], reference(tiny, A, token_type_ids=types))
    assert np.allclose(result.hidden[1], result.hidden[2]) == (rig.spec.encoder.token_types == 1)


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_answer_with_their_last_token(built: Any, name: str) -> None:
    tiny = built(name)
    rig = Rig(tiny.path)
    assert "lm_head.weight" not in rig.places
    rig.step(chunks=[Chunk(1, 0, ints(A[:13]), False)], new=[rig.new(1, A)])
    chunks = [Chunk(1, 13, ints(A[13:]), False, hidden="last"), Chunk(2, 0, ints(B), False, hidden="last")]
    result = rig.step(chunks=chunks, new=[rig.new(2, B)])
    close(result.hidden[1], reference(tiny, A)[-1:])
    close(result.hidden[2], reference(tiny, B)[-1:])


def test_sums_of_chunks_are_the_sum_of_the_prompt(built: Any) -> None:
    tiny = built("LlamaModel")
    rig = Rig(tiny.path)
    sums = []
    new = [rig.new(1, A)]
    for start, end in ((0, 7), (7, 22), (22, 30)):
        chunk = Chunk(1, start, ints(A[start:end]), False, hidden="sum")
        sums.append(rig.step(chunks=[chunk], new=new).hidden[1])
        new = []
    assert all(each.shape == (1, 64) for each in sums)
    close(np.concatenate(sums).sum(0), reference(tiny, A).sum(0))


@pytest.mark.parametrize("cuts", [[30], [4, 21, 30]])
def test_hidden_states_of_prompt_and_output(built: Any, cuts: list[int]) -> None:
    tiny = built("llama")
    rig = Rig(tiny.path)
    params = SamplingParams(temperature=0.0, hidden="all")
    new, start, got, other = [rig.new(1, A, params=params), rig.new(2, B)], 0, [], {}
    for cut in cuts:
        chunks = [Chunk(1, start, ints(A[start:cut]), cut == 30, hidden="all")]
        if start == 0:
            chunks.append(Chunk(2, 0, ints(B), True))
        result = rig.step(chunks=chunks, new=new)
        got.append(result.hidden[1])
        other |= {slot: 0 for slot in result.hidden if slot != 1}
        new, start = [], cut
    tokens = [int(result.tokens[0])]
    for _ in range(5):
        result = rig.step(decode=[2, 1])
        tokens.append(int(result.tokens[1]))
        assert result.hidden[1].shape == (1, 64)
        got.append(result.hidden[1])
        other |= {slot: 0 for slot in result.hidden if slot != 1}
    assert not other, "nobody else asked"
    close(np.concatenate(got), states(tiny, A + tokens[:-1]))


def test_only_what_is_owed_is_given(built: Any) -> None:
    """After a retraction a part of the prompt is computed a second time."""
    tiny = built("llama")
    rig = Rig(tiny.path)
    chunk = Chunk(1, 0, ints(A), False, hidden="all", hidden_start=12)
    result = rig.step(chunks=[chunk], new=[rig.new(1, A)])
    close(result.hidden[1], states(tiny, A)[12:])


@torch.no_grad()
def states(tiny: Tiny, tokens: list[int]) -> torch.Tensor:
    """Hidden states after the last norm."""
    return tiny.reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0]


def test_a_checkpoint_saved_without_a_head_or_with_one_reads_the_same(built: Any, tmp_path: Any) -> None:
    """Names begin with `model.` or they do not."""
    whole = built("llama")
    whole.reference.model.save_pretrained(tmp_path)
    bare = Rig(tmp_path)
    assert bare.spec.task == "embed"
    chunk = Chunk(1, 0, ints(A), False, hidden="last")
    got = bare.step(chunks=[chunk], new=[bare.new(1, A)]).hidden[1]
    close(got, states(whole, A)[-1:])
