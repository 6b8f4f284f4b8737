"""Prompt lookup on a CPU: behind steps that a test makes up, against a search of whole texts; and in a whole
engine, whose answers are those without drafts."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from app.engine.job import Job
from gpu.draft.ngram import NgramDrafter
from gpu.state.history import MAX_TOKENS, history_bytes
from gpu.state.tables import SlotTables
from tests.rigs import tiny_model
from tests.rigs.draft_jobs import HOSTS_OWN, TOKENS, Engines, engines_of, jobs, same
from tests.rigs.ngram import UNTOUCHED, Texts, by_lookup, lookup
from tests.rigs.runner import CPU

ROWS, SAMPLES, STEPS = 7, 60, 800


@pytest.mark.parametrize("longest", [4, 2])
@pytest.mark.parametrize(("width", "most"), [(16, 3), (64, 1), (64, 7), (256, 4)])
def test_drafts_are_what_followed_the_newest_tokens_before(width: int, most: int, longest: int) -> None:
    texts = Texts(width + most, ROWS, most, width)
    drafter = NgramDrafter(texts.tables, width, most, lookup(longest))
    seen = dict.fromkeys(("drafts", "none", "at its limit", "wrapped", "tried again"), 0)
    for at in range(STEPS):
        step, proposes = texts.next(), at % 50 < 49
        drafter.prepare(step.plan)
        drafter.propose(step.outcome(SAMPLES, proposes=proposes), ROWS)
        for slot, first in texts.rows:
            wanted = texts.drafts(slot, first, longest, 2) if proposes else []
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
        history = NgramDrafter(tables, context, 3, lookup()).history
        assert history.width == width
        assert history.words.nbytes == history_bytes(tables.slots, context)


def test_numbers_that_do_not_fit_together_are_refused() -> None:
    tables = SlotTables(4, 1, CPU, 3)
    with pytest.raises(ValueError, match="3 to 2"):
        NgramDrafter(tables, 64, 3, lookup(2, 3))
    with pytest.raises(ValueError, match="4 drafts of a row where the tables hold 3"):
        NgramDrafter(tables, 64, 4, lookup())


FEW = tuple((token, 60.0) for token in range(97, 101))
"""A bias to so few tokens that a random model repeats itself."""
UNPREDICTABLE = {"penalties", "bias", "grammar, drawn"}
"""Their tokens are less likely the more often they came."""


def repetitive() -> list[Job]:
    """Requests of every kind, of texts with repeats."""
    found = []
    for job in jobs():
        sampling = msgspec.structs.replace(job.sampling, logit_bias=job.sampling.logit_bias or FEW)
        length = 2 * TOKENS if job.max_tokens == TOKENS else job.max_tokens
        found.append(msgspec.structs.replace(job, sampling=sampling, max_tokens=length))
    return found


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with engines_of(tiny_model.build("qwen3-moe", tmp_path_factory.mktemp("moe")).path) as made:
        yield made


@pytest.mark.parametrize(("overlap", "context"), [(0, 256), (1, 32), (2, 256)])
async def test_every_option_has_the_answer_that_it_has_without_drafts(
    engines: Engines, overlap: int, context: int
) -> None:
    """Whether the texts fit into their rings or not."""
    plain = await engines.plain(repetitive())
    engine = engines.make(by_lookup(context), overlap)
    for answer in await engine.answers(repetitive()):
        same(answer, plain[answer.run.id])
        most = engine.runner.most.get(answer.run.prompt.tobytes(), 0)
        if answer.run.id in HOSTS_OWN:
            assert most == 1
        elif len(answer.tokens) == 2 * TOKENS and answer.run.id not in UNPREDICTABLE:
            assert most > 1, f"no draft of {answer.run.id} was taken"
    assert max(engine.runner.most.values()) == 5


async def test_retracted_rows_are_looked_up_in_their_whole_texts(engines: Engines) -> None:
    plain = await engines.plain(repetitive())
    engine = engines.make(by_lookup(256), 1)
    for answer in await engine.answers(repetitive(), retract=True):
        same(answer, plain[answer.run.id])
    assert engine.scheduler.counters.retractions > 5
    assert max(engine.runner.most.values()) == 5
