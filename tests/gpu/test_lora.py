"""Adapters in steps of plain torch: the text of merged weights, whatever shares the batch."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from core.adapters import LINEAR, TARGETS
from core.plan import Chunk
from core.request import SamplingParams
from tests.rigs import lora, tiny_model
from tests.rigs.arrays import ints
from tests.rigs.lora import LIMITS
from tests.rigs.runner import Rig

PROMPT = [int(i * 37 % 251) + 3 for i in range(40)]
OTHER = [int(i * 53 % 241) + 5 for i in range(23)]
VARIANTS = ("llama", "qwen3", "qwen3-moe-mixed")
TOKENS = 10


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints with heads of their own: weights that are merged into a table are not its head's."""

    def made(name: str) -> Path:
        return tiny_model.build(name, tmp_path_factory.mktemp(name), tie_word_embeddings=False).path

    return {name: made(name) for name in (*VARIANTS, "gemma3", "gpt-oss", "deepseek-v2", "qwen3-next")}


def rig(path: Path) -> Rig:
    return Rig(path, adapters=LIMITS)


@pytest.mark.parametrize(
    ("variant", "target"),
    [
        *product(VARIANTS, [*TARGETS, "all"]),
        *product(("gemma3", "gpt-oss", "deepseek-v2", "qwen3-next"), ["all"]),
    ],
)
def test_an_adapter_is_as_good_as_merged_weights(
    paths: dict[str, Path], tmp_path: Path, variant: str, target: str
) -> None:
    path = paths[variant]
    adapter = lora.adapter_for(path, TARGETS if target == "all" else [target])
    own, other = rig(path), Rig(lora.merged(path, adapter, tmp_path / "merged"))
    own.place("a", lora.save(adapter, tmp_path / "a"), 1)
    base = own.generate(2, PROMPT, TOKENS)
    assert own.generate(1, PROMPT, TOKENS, place=1) == other.generate(1, PROMPT, TOKENS) != base
    torch.testing.assert_close(own.watched.seen, other.watched.seen, rtol=1e-3, atol=1e-3)
    assert own.generate(3, PROMPT, TOKENS) == base, "rows without an adapter are the base model's"


def test_rows_of_any_adapter_share_steps(paths: dict[str, Path], tmp_path: Path) -> None:
    """Ranks 2, 8 and 5 and none; two prompts in chunks beside rows that decode."""
    path = paths["qwen3-moe-mixed"]
    own = rig(path)
    for place, rank in enumerate((2, 8, 5)):
        adapter = lora.adapter_for(path, TARGETS, rank, seed=rank)
        own.place(str(place), lora.save(adapter, tmp_path / str(place), rank=rank), place)
    prompts = {1: PROMPT, 2: OTHER, 3: PROMPT, 4: PROMPT[5:]}
    places = {1: 0, 2: 1, 3: -1, 4: 2}
    alone = {slot: own.generate(slot, prompts[slot], 8, place=places[slot]) for slot in prompts}
    assert len({tuple(text) for text in alone.values()}) == 4

    texts: dict[int, list[int]] = {slot: [] for slot in prompts}
    fresh = [own.new(slot, prompts[slot], place=places[slot]) for slot in (1, 3)]
    chunks = [Chunk(slot, 0, ints(prompts[slot]), True) for slot in (1, 3)]
    steps = [(1, 3), own.step(chunks=chunks, new=fresh).tokens]
    for start in (0, 11):  # two prompts in two pieces
        end = (11, None)[start > 0]
        chunks = [Chunk(slot, start, ints(prompts[slot][start:end]), start > 0) for slot in (2, 4)]
        new = [] if start else [own.new(slot, prompts[slot], place=places[slot]) for slot in (2, 4)]
        slots = (1, 3, 2, 4) if start else (1, 3)
        steps += [slots, own.step(decode=[1, 3], chunks=chunks, new=new).tokens]
    for _ in range(5):
        steps += [(4, 1, 3, 2), own.step(decode=[4, 1, 3, 2]).tokens]
    for slots, tokens in zip(steps[::2], steps[1::2], strict=True):
        for slot, token in zip(slots, tokens, strict=True):
            texts[int(slot)].append(int(token))
    for slot, text in texts.items():
        assert text == alone[slot][: len(text)] and len(text) >= 6


def test_a_place_is_used_again_while_others_run(paths: dict[str, Path], tmp_path: Path) -> None:
    path = paths["llama"]
    saved = [
        lora.save(lora.adapter_for(path, targets, rank, seed=seed), tmp_path / str(seed), rank=rank)
        for seed, (targets, rank) in enumerate([(TARGETS, 8), (["q_proj", "v_proj"], 2), (LINEAR, 4)])
    ]
    own = rig(path)
    own.place("first", saved[0], 0)
    own.place("second", saved[1], 1)
    small, large = own.generate(1, PROMPT, 12, place=1), own.generate(1, PROMPT, 4, place=0)
    own.step(chunks=[Chunk(1, 0, ints(PROMPT), True)], new=[own.new(1, PROMPT, place=1)])
    text = [int(own.step(decode=[1]).tokens[0]) for _ in range(3)]
    assert own.command("adapter_drop", "first") is None
    own.place("third", saved[2], 0)
    text += [int(own.step(decode=[1]).tokens[0]) for _ in range(8)]
    assert text == small[1:]
    found = own.generate(2, PROMPT, 4, place=0)
    fresh = rig(path)
    fresh.place("third", saved[2], 0)
    assert found == fresh.generate(1, PROMPT, 4, place=0) != large, "nothing of the larger adapter is left"


def test_prompt_logprobs_and_hidden_states_are_the_adapters(paths: dict[str, Path], tmp_path: Path) -> None:
    path = paths["qwen3"]
    adapter = lora.adapter_for(path, TARGETS)
    own, other = rig(path), Rig(lora.merged(path, adapter, tmp_path / "merged"))
    own.place("a", lora.save(adapter, tmp_path / "a"), 2)

    def asked(of: Rig, place: int) -> tuple[np.ndarray, np.ndarray]:
        params = SamplingParams(temperature=0.0, hidden="all")
        chunk = Chunk(1, 0, ints(PROMPT), True, logprobs=2, hidden="all")
        beside = Chunk(2, 0, ints(OTHER), True, logprobs=0)  # of the base model
        new = [of.new(1, PROMPT, params=params, place=place), of.new(2, OTHER)]
        result = of.step(chunks=[chunk, beside], new=new)
        return result.prompt_logprobs[1].values, result.hidden[1]

    for got, want in zip(asked(own, 2), asked(other, -1), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)
