"""Hits of eviction orders, beside the best that is possible."""

from __future__ import annotations

import json
import random
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from bench.core import eviction
from bench.core.eviction import Traffic, chats, found_by, found_by_clairvoyance, measured, recorded
from core.config import Eviction


def test_chats_share_what_conversations_share() -> None:
    """Each turn begins with what was kept of the last one of its conversation."""
    made, kept = chats(), set()
    begun = 0
    for prompt, whole in zip(made.prompts, made.kept, strict=True):
        assert whole[: len(prompt)].tolist() == prompt.tolist() and len(whole) > len(prompt)
        begun += any(tuple(prompt[:cut].tolist()) in kept for cut in range(len(prompt) - 1, 16, -1))
        kept.add(tuple(whole.tolist()))
    turns = len(made.prompts)
    assert turns - begun == eviction.CONVERSATIONS < turns
    assert [each.tolist() for each in chats(1).prompts] != [each.tolist() for each in made.prompts]


@pytest.mark.parametrize("seed", range(8))
def test_clairvoyance_is_the_best_of_all_choices(seed: int) -> None:
    """A search of everything that could be kept, on prompts of a few pages."""
    rng = random.Random(seed)
    chains = [(1, 2, 3), (1, 2, 4), (1, 5), (6, 7), (6, 8)]
    prompts = [chain[: rng.randint(1, len(chain))] for chain in rng.choices(chains, k=9)]
    arrays = [np.array(prompt, np.int32) for prompt in prompts]
    pages = 4

    @cache
    def best(at: int, cached: frozenset[int]) -> int:
        if at == len(prompts):
            return 0
        prompt = prompts[at]
        hits = next((i for i, page in enumerate(prompt) if page not in cached), len(prompt))
        others = sorted(cached - set(prompt))
        room = min(pages - len(prompt), len(others))
        kept = (frozenset(prompt) | frozenset(left) for left in combinations(others, room))
        return hits + max(best(at + 1, each) for each in kept)

    found = found_by_clairvoyance(Traffic("tiny", 1, arrays, arrays), pages)
    assert found == pytest.approx(best(0, frozenset()) / sum(map(len, prompts)))


def test_every_order_is_between_nothing_and_clairvoyance() -> None:
    found = measured(chats(), 65_536)
    assert set(found) == {*get_args(Eviction), "clairvoyant", "endless"}
    for order in get_args(Eviction):
        assert 0.3 < found[order] <= found["clairvoyant"] < found["endless"]
    assert found["lfu"] >= found["lru"], "its uses age"


def test_prompts_larger_than_the_pool_count_for_nobody() -> None:
    long, short = np.arange(9, dtype=np.int32), np.array([100, 101], np.int32)
    traffic = Traffic("mixed", 1, [long, short, short], [long, short, short])
    assert found_by("lru", traffic, 4) == found_by_clairvoyance(traffic, 4) == 0.5


def test_a_trace_is_read_and_results_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.results.RESULTS", tmp_path)
    monkeypatch.setattr(eviction, "CONVERSATIONS", 20)
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": i, "input_length": 1024, "output_length": 1, "hash_ids": [0, i // 2]} for i in range(6)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    eviction.main(["--trace", str(trace), "--tokens", "4096"])
    found = json.loads((tmp_path / "eviction.json").read_text())["found"]
    assert found["trace.jsonl, 4096 tokens"]["lru"] == pytest.approx(8 / 12, abs=1e-3)
    assert "clairvoyant" in capsys.readouterr().out
    (tmp_path / "azure.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
    )
    with pytest.raises(ValueError, match="no hash ids"):
        recorded(tmp_path / "azure.csv")
