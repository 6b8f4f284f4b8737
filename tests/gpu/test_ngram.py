"""Prompt lookup on a CPU, by steps that a test makes up, against a search of whole texts."""

from __future__ import annotations

import pytest

from gpu.draft.ngram import NgramDrafter
from gpu.state.history import MAX_TOKENS, history_bytes
from gpu.state.tables import SlotTables
from tests.rigs.ngram import UNTOUCHED, Texts
from tests.rigs.runner import CPU

ROWS, SAMPLES, STEPS = 7, 60, 400


@pytest.mark.parametrize("longest", [4, 2])
@pytest.mark.parametrize(("width", "most"), [(16, 3), (64, 1), (64, 7), (256, 4)])
def test_drafts_are_what_followed_the_newest_tokens_before(width: int, most: int, longest: int) -> None:
    texts = Texts(width + most, ROWS, most, width)
    drafter = NgramDrafter(texts.tables, width, most, longest=longest, shortest=2)
    seen = dict.fromkeys(("drafts", "none", "at its limit", "wrapped", "tried again"), 0)
    for _ in range(STEPS):
        step = texts.next()
        drafter.prepare(step.plan)
        drafter.propose(step.outcome(SAMPLES), ROWS)
        for slot, first in texts.rows:
            wanted = texts.drafts(slot, first, longest, 2)
            count, *ids = texts.tables.drafts[slot].tolist()
            assert ids[:count] == wanted
            seen["drafts" if wanted else "none"] += 1
            seen["at its limit"] += len(texts.texts[slot]) == first
            seen["tried again"] += len(wanted) > 0 and texts.quiet(slot)
            seen["wrapped"] += len(texts.texts[slot]) > width
        assert texts.tables.drafts[0].tolist() == [UNTOUCHED] * (1 + most)
        assert not drafter.history.words[0].any()
    assert min(*seen.values(), 10 * texts.taken) > 3, seen


def test_the_memory_of_a_long_context_is_bounded() -> None:
    tables = SlotTables(4, 1, CPU, 3)
    for context, width in ((100, 128), (128, 128), (MAX_TOKENS + 1, MAX_TOKENS), (10**6, MAX_TOKENS)):
        history = NgramDrafter(tables, context, 3).history
        assert history.width == width
        assert history.words.nbytes == history_bytes(tables.slots, context)


def test_numbers_that_do_not_fit_together_are_refused() -> None:
    tables = SlotTables(4, 1, CPU, 3)
    with pytest.raises(ValueError, match="3 to 2"):
        NgramDrafter(tables, 64, 3, longest=2, shortest=3)
    with pytest.raises(ValueError, match="4 drafts of a row where the tables hold 3"):
        NgramDrafter(tables, 64, 4)
