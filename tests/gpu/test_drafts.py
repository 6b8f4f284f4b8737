"""Rows of several tokens through a whole step: right and wrong drafts, and the text of one token a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.plan import Chunk, NewSlot, PageWrites, StepPlan
from core.types import NO_TOKENS
from gpu.runner import ModelRunner
from gpu.state.entry import Limits
from gpu.step.rings import Entries
from gpu.thread import device_thread
from tests.rigs import tiny_model
from tests.rigs.arrays import ints
from tests.rigs.runner import CPU, GREEDY, Rig

DRAFTS, TOKENS = 3, 24
PROMPTS = {1: list(range(3, 13)), 2: [int(i * 31 % 250) + 2 for i in range(29)]}


@pytest.mark.parametrize("variant", ["deepseek-v2", "llama", "mistral", "qwen3-moe", "gpt-oss"])
def test_drafts_change_how_many_steps_a_text_takes_and_nothing_else(variant: str, tmp_path: Path) -> None:
    tiny = tiny_model.build(variant, tmp_path)
    texts = {slot: tiny_model.greedy(tiny.reference, prompt, TOKENS) for slot, prompt in PROMPTS.items()}
    rig = Rig(tiny.path, page_size=16, rows=4)
    limits = Limits(4, 4, 128, 64, 65, samples=16, drafts=DRAFTS)
    runner = ModelRunner(rig.runner.shape, rig.runner._machine, Entries(limits, 4, CPU))
    made: dict[int, list[int]] = {slot: [] for slot in PROMPTS}

    def play(plan: StepPlan, slots: list[int]) -> list[int]:
        result = runner.launch(plan).wait()
        tokens = result.tokens.tolist()
        counts = [1] * len(slots) if result.counts is None else result.counts.tolist()
        for slot, count in zip(slots, counts, strict=True):
            made[slot] += tokens[:count]
            tokens = tokens[count:]
        assert not tokens
        return counts

    with device_thread(CPU):
        runner.use_model(rig.model)
        runner.use_pool(rig.pool)
        runner.prepare()
        cells = [(slot, at, 8 * slot + at) for slot in PROMPTS for at in range(4)]
        new = tuple(
            NewSlot(slot, GREEDY, ints(prompt), NO_TOKENS, 0, limit=len(prompt) + TOKENS - 1)
            for slot, prompt in PROMPTS.items()
        )
        first, second = (Chunk(slot, 0, ints(prompt), True) for slot, prompt in PROMPTS.items())
        play(StepPlan(0, NO_TOKENS, (first,), new, PageWrites(*ints(cells).T)), [1])
        step, most = 0, 0
        while any(len(text) < TOKENS for text in made.values()):
            step += 1
            rows = [slot for slot in PROMPTS if made[slot]]
            for slot in rows:  # of the first row's drafts all are right, of the second's every third
                ahead = texts[slot][len(made[slot]) :][:DRAFTS]
                drafts = [token + (slot == 2 and (step + j) % 3 != 0) for j, token in enumerate(ahead)]
                there = [len(drafts), *drafts]
                runner.tables.drafts[slot, : len(there)] = torch.tensor(there, dtype=torch.int32)
            chunks = (second,) if step == 2 else ()
            plan = StepPlan(step, ints(rows), chunks, query_length=1 + DRAFTS, drafts=DRAFTS * len(rows))
            counts = play(plan, rows + [chunk.slot for chunk in chunks])
            most = max(most, *counts)
            assert step < 2 * TOKENS, "a row makes no progress"
    assert made == texts
    assert most == 1 + DRAFTS
