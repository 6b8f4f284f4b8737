"""Drafts from the answers of other requests, on a CPU: who finds which, and for how long; and in a whole
engine, whose answers are those without drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import pytest

from app.engine.job import DraftCounts, Job
from app.helper.process import HelperProcess
from app.text.tokenizer import Tokenizer
from core.plan import NewSlot, StepPlan
from core.request import SamplingParams
from core.types import NO_TOKENS, RootKey
from gpu.draft.ngram import NgramDrafter
from gpu.grammar import Compiler
from gpu.state.history import NO_TOKEN
from gpu.state.served import BLOCK, LEAST_WIDTH, make_served, served_bytes
from gpu.state.tables import SlotTables
from tests.rigs import tiny_model
from tests.rigs.arrays import ints
from tests.rigs.draft_jobs import STOP, Engines, jobs, same
from tests.rigs.drafting import Answer, Drafts
from tests.rigs.ngram import LETTERS, Step, Texts, by_lookup, lookup
from tests.rigs.runner import CPU, GREEDY
from tests.rigs.tiny_model import VOCAB

MOST, SAMPLES = 4, 48
PROMPT = list(range(900, 910))
ANSWER = list(range(100, 150))
AGAIN = ", again"


class Talk:
    """Answers told token by token: no draft is ever verified, so each row gets one at a time, and one after
    64 steps at last. Where a row finds something, `EXPECTED` says at least one draft."""

    def __init__(self, capacity: int, rows: int = 3) -> None:
        self.tables = SlotTables(rows, 1, CPU, MOST)
        self._drafter = NgramDrafter(self.tables, 1024, MOST, lookup(capacity=capacity))
        self._step = 0

    def tell(
        self, slot: int, namespace: int, answer: Sequence[int], prompt: Sequence[int] = PROMPT
    ) -> list[list[int]]:
        """The drafts behind each token of `answer`."""
        tables, found = self.tables, []
        tables.limit[slot], tables.max_drafts[slot], tables.drafts[slot, 0] = 10**6, MOST, 0
        new = (NewSlot(slot, GREEDY, ints(prompt), NO_TOKENS, 0, namespace=namespace),)
        for at, token in enumerate(answer):
            self._step += 1
            step = Step(StepPlan(self._step, NO_TOKENS, (), new), [(slot, len(prompt) + at)], [0], [token])
            tables.length[slot] = len(prompt) + at
            self._drafter.prepare(step.plan)
            self._drafter.propose(step.outcome(SAMPLES), 1)
            count, *ids = tables.drafts[slot].tolist()
            found.append(ids[:count])
            new = ()
        return found


def test_a_former_answer_is_drafted_from_its_first_token_on() -> None:
    talk = Talk(4000)
    assert talk.tell(1, 7, ANSWER) == [[]] * len(ANSWER)
    for slot in (2, 1):
        assert talk.tell(slot, 7, ANSWER) == [*([each] for each in ANSWER[1:]), []]


def test_another_namespace_and_none_find_nothing() -> None:
    talk = Talk(4000)
    talk.tell(1, 7, ANSWER)
    for slot, namespace in ((2, 8), (3, 0), (1, -7), (2, 2**62), (3, 0)):
        assert talk.tell(slot, namespace, ANSWER) == [[]] * len(ANSWER)
    assert talk.tell(2, 8, ANSWER)[0] == ANSWER[1:2]


def test_the_newer_of_two_answers_is_found() -> None:
    talk, other = Talk(4000), [*ANSWER[:20], *range(300, 320)]
    talk.tell(1, 7, ANSWER)
    talk.tell(2, 7, other)
    assert talk.tell(3, 7, ANSWER)[19] == [300]
    assert talk.tell(2, 7, other)[19] == [120]


def test_what_the_ring_has_written_over_is_forgotten() -> None:
    talk, kept = Talk(1), LEAST_WIDTH - len(ANSWER)
    talk.tell(1, 7, ANSWER)
    talk.tell(1, 8, range(1000, 1000 + kept - 40))
    assert talk.tell(2, 7, ANSWER)[0] == ANSWER[1:2]
    talk.tell(2, 8, range(1000, 1000 + 2 * LEAST_WIDTH))
    talk.tell(1, 8, range(3000, 3000 + 2 * LEAST_WIDTH))
    assert talk.tell(3, 7, ANSWER) == [[]] * len(ANSWER)


@pytest.mark.parametrize("capacity", [0, 1, 5000, 10**6])
def test_its_memory_is_what_is_counted(capacity: int) -> None:
    made = make_served(33, capacity, CPU)
    taken = 0 if made is None else sum(each.nbytes for each in made)
    assert taken == served_bytes(33, capacity)
    if made is not None:
        assert made.tokens.numel() <= max(capacity, 33 * LEAST_WIDTH)


def check_owners(drafter: NgramDrafter) -> None:
    """Every block has tokens of its owner alone."""
    served = drafter.history.served
    assert served is not None
    owners = served.owners.repeat_interleave(BLOCK, 1)
    own = (served.tokens >= owners * LETTERS) & (served.tokens < (owners + 1) * LETTERS)
    assert (own | (served.tokens == 0) | (served.tokens == NO_TOKEN)).all()


@pytest.mark.parametrize("capacity", [1, 3000, 100_000])
def test_no_draft_is_from_another_namespace(capacity: int) -> None:
    """Answers come and go in small rings and few buckets; each namespace has tokens of its own. The 0 is what
    a token that could not be sampled is taken for."""
    texts = Texts(capacity, 8, MOST, 32, namespaces=3)
    drafter = NgramDrafter(texts.tables, 32, MOST, lookup(2, capacity=capacity))
    found = 0
    for _ in range(600):
        step = texts.next()
        drafter.prepare(step.plan)
        drafter.propose(step.outcome(SAMPLES), 8)
        for slot, _ in texts.rows:
            count, *ids = texts.tables.drafts[slot].tolist()
            first = texts.namespace[slot] * LETTERS
            assert {0, *ids[:count]} <= {0, *range(first, first + LETTERS)}
            found += count
        check_owners(drafter)
    assert found > 500 and texts.taken > 100


# -- through all layers ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    tokenizer = Tokenizer.load(None, VOCAB, [STOP])
    compiler = Compiler(tokenizer.token_table(VOCAB), HelperProcess())
    yield Engines(
        tiny_model.build("qwen3-moe", tmp_path_factory.mktemp("moe"), **tiny_model.FEW_EXPERTS).path,
        tokenizer,
        compiler,
    )
    compiler.close()


def told(name: str, root: RootKey, temperature: float = 1.0) -> Job:
    """A request whose answer repeats nothing. All have the same one."""
    return Job(
        id=name,
        prompt=np.arange(20, 60, dtype=np.int32),
        seed=11,
        max_tokens=60,
        ignore_eos=True,
        root=root,
        sampling=SamplingParams(temperature=temperature),
    )


def counts(answer: Answer) -> DraftCounts:
    found = answer.run.drafts(0)
    assert found is not None
    return found


@pytest.mark.parametrize("overlap", [0, 1, 2])
async def test_the_next_request_profits_unless_it_may_not_share(engines: Engines, overlap: int) -> None:
    """How many drafts a request has shows nothing of the answers to others."""
    roots = {
        "first": RootKey(),
        "second": RootKey(),
        "salted": RootKey(salt="a"),
        "other salt": RootKey(salt="b"),
        "other tenant": RootKey(tenant="t"),
        "salted again": RootKey(salt="a"),
    }
    todo = [told(name, root) for name, root in roots.items()]
    engine = engines.make(by_lookup(256, 10_000), overlap)
    got = {answer.run.id: answer for answer in await engine.answers(todo, alone=True)}
    plain = (await engines.make(Drafts(0, 0.0), overlap).answers(todo[:1]))[0]
    for answer in got.values():
        same(answer, plain)
    for name in ("second", "salted again"):
        assert counts(got[name]).accepted > 40
    for name in ("salted", "other salt", "other tenant"):
        assert counts(got[name]) == counts(got["first"])


@pytest.mark.parametrize(("overlap", "retract"), [(0, True), (1, False), (1, True), (2, True)])
async def test_every_option_has_the_answer_that_it_has_without_drafts(
    engines: Engines, overlap: int, retract: bool
) -> None:
    plain = await engines.plain(jobs())
    engine = engines.make(by_lookup(256, 3000), overlap)
    again = [msgspec.structs.replace(job, id=f"{job.id}{AGAIN}") for job in jobs()]
    for answer in await engine.answers([*jobs(), *again], retract=retract):
        same(answer, plain[answer.run.id.removesuffix(AGAIN)])
    assert max(engine.runner.most.values()) == 1 + MOST
