"""Drafts that drafters leave in the tables, against plain torch over each row's whole text at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from app.engine.job import Job
from core.models import DraftSpec, ModelSpec, read_draft
from core.plan import Chunk, NewSlot, StepPlan
from core.request import SamplingParams
from core.types import NO_TOKENS
from gpu.build import spec_of
from gpu.draft.drafter import Drafter, StepOutcome
from gpu.draft.successors import Successors
from gpu.draft.tree import Tree
from gpu.kv.pool import KvPool
from gpu.models.base import CausalModel
from gpu.sample.noise import bits, exponential, row_keys
from gpu.state.tables import SlotTables
from tests.rigs import draft_heads, drafters, tiny_model
from tests.rigs.arrays import ints
from tests.rigs.draft_jobs import Engines, engines_of
from tests.rigs.drafting import PAGE, SAMPLES, Drafts
from tests.rigs.naive_heads import Naive
from tests.rigs.runner import GREEDY, Rig
from tests.rigs.tiny_model import VOCAB, Tiny

LENGTHS = [2, 12, 16, 61, 90, 7, 130]
"""Lengths of prompts: those of more than 48 tokens come in several chunks."""


class Made(NamedTuple):
    """The drafts of a row: its last token is the text's `length`-th; `room` tokens may stand in its pages."""

    prompt: bytes
    length: int
    last: int
    seed: int
    room: int
    drafts: list[int]
    survival: list[float]
    ancestors: list[int]


class Recorded:
    """A drafter; notes what it leaves in the tables."""

    def __init__(self, inner: Drafter, tables: SlotTables, made: list[Made]) -> None:
        self.aux, self.keeps_kv = inner.aux, inner.keeps_kv
        self._inner, self._tables, self._made = inner, tables, made
        self._new: dict[int, NewSlot] = {}
        self._pages: dict[int, int] = {}

    def use_model(self, target: CausalModel | None) -> None:
        self._inner.use_model(target)

    def use_pool(self, pool: KvPool | None) -> None:
        self._inner.use_pool(pool)

    def prepare(self, plan: StepPlan) -> None:
        self._inner.prepare(plan)
        for new in plan.new_slots:
            self._new[new.slot], self._pages[new.slot] = new, 0
        writes = plan.page_writes
        for slot, index in zip(writes.slots.tolist(), writes.indices.tolist(), strict=True):
            self._pages[slot] = index + 1

    def follow(self, outcome: StepOutcome) -> None:
        self._inner.follow(outcome)

    def propose(self, outcome: StepOutcome, rows: int) -> None:
        tables = self._tables
        slots = outcome.samples.slots[: int(outcome.samples.drafts.rows)].tolist()
        tables.drafts[slots] = -1
        self._inner.propose(outcome, rows)
        for slot in slots if self._new else ():  # none while costs are measured
            count, *drafts = tables.drafts[slot].tolist()
            columns = (tables.length, tables.last_token, tables.seed)
            length, last, seed = (int(column[slot]) for column in columns)
            room = min(self._pages[slot] * PAGE, int(tables.limit[slot]))
            prompt = self._new[slot].prompt.tobytes()
            seen = [] if tables.ancestors is None else tables.ancestors[slot].tolist()
            survival = tables.survival[slot].tolist()
            self._made.append(Made(prompt, length, last, seed, room, drafts[:count], survival, seen))


class Guesses:
    """The drafts of a head of `draft_heads`, one row and one text at a time."""

    def __init__(self, name: str, tiny: Tiny, target: ModelSpec) -> None:
        self.spec: DraftSpec = read_draft(draft_heads.CONFIGS[name], target)
        self.free = 0 if self.spec.algorithm == "dflash" else 2
        """Drafts whose own forward writes no page."""
        self._naive, reference = Naive(name), tiny.reference
        weights = self._naive.weights
        self._reference = reference
        self._embedding = weights.get("embed_tokens.weight", reference.get_input_embeddings().weight)
        self._head = weights.get("lm_head.weight", reference.get_output_embeddings().weight)
        self._fused: dict[bytes, torch.Tensor] = {}

    def fused(self, text: torch.Tensor) -> torch.Tensor:
        """The draft's input from the target's states behind each token."""
        key = text.numpy().tobytes()
        if key not in self._fused:
            states = self._reference(text[None], output_hidden_states=True).hidden_states
            aux = torch.cat([states[i][0] for i in self.spec.aux_layers or (-1,)], 1)
            if self.spec.algorithm == "eagle3":
                aux = self._naive.fuse(aux)
            if self.spec.algorithm == "dflash":
                aux = self._naive.norm("hidden_norm", self._naive.linear("fc", aux))
            self._fused[key] = aux
        return self._fused[key]

    def logits(self, fused: torch.Tensor, text: torch.Tensor, drafts: list[int]) -> torch.Tensor:
        """[drafts, vocab]: for each of `drafts` behind `text`, whose last token has no state, given those
        before it."""
        block = self.spec.algorithm == "dflash"
        out = self._block(fused, text, len(drafts)) if block else self._chain(fused, text, drafts)
        found: torch.Tensor = out @ self._head.T
        if "d2t" not in self._naive.weights:
            return found
        offsets = self._naive.weights["d2t"]
        whole = torch.full((len(drafts), VOCAB), float("-inf"))
        whole[:, offsets + torch.arange(len(offsets))] = found
        return whole

    def _block(self, fused: torch.Tensor, text: torch.Tensor, count: int) -> torch.Tensor:
        ids = torch.tensor([int(text[-1]), *[self.spec.mask_token] * count])
        states: torch.Tensor = self._naive.dflash(fused, self._embedding[ids], self.spec.causal)
        return states[1:]

    def _chain(self, hidden: torch.Tensor, text: torch.Tensor, drafts: list[int]) -> torch.Tensor:
        spec, naive, out = self.spec, self._naive, []
        for at in range(len(drafts)):
            ids = torch.cat([text[1:], torch.tensor(drafts[:at], dtype=torch.int64)])
            if spec.algorithm == "eagle":
                made = following = naive.eagle(self._embedding[ids], hidden, spec.decoder.layers)
            else:
                following = naive.eagle3(self._embedding[ids], hidden, spec)
                made = naive.norm("norm", following)
                following = made if spec.norm_output else following
            out.append(made[-1])
            hidden = torch.cat([hidden, following[-1:]])
        return torch.stack(out)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A target with the layers that the heads of `draft_heads` are for."""
    return tiny_model.build("llama", tmp_path_factory.mktemp("target"), num_hidden_layers=6)


@pytest.fixture(scope="module")
def engines(tiny: Tiny) -> Iterator[Engines]:
    with engines_of(tiny.path) as made:
        yield made


def jobs() -> list[Job]:
    """Every second one is drawn, the others are greedy."""
    return [
        Job(
            id=str(at),
            prompt=np.array([5, 100 + at, *(i * 31 % 250 + 4 for i in range(length - 2))], np.int32),
            seed=at,
            sampling=SamplingParams(temperature=float(at % 2)),
            max_tokens=16,
            ignore_eos=True,
        )
        for at, length in enumerate(LENGTHS)
    ]


@pytest.mark.parametrize(
    ("name", "samples", "retract"),
    [
        *((name, SAMPLES, False) for name in draft_heads.CONFIGS),
        *((name, SAMPLES, True) for name in ("eagle", "eagle3", "dflash")),
        ("dflash-speculators", 9, True),
    ],
)
async def test_drafts_are_those_of_the_whole_text(
    engines: Engines, tiny: Tiny, tmp_path: Path, name: str, samples: int, retract: bool
) -> None:
    """Drafts of several rows at once, behind prompts in chunks and across pages; and where prompts and
    answers come from the cache. In 9 samples there is room for the blocks of two rows."""
    texts = {answer.run.prompt.tobytes(): answer for answer in (await engines.plain(jobs())).values()}
    made = list[Made]()
    head = drafters.head(name, tmp_path, samples=samples)

    def recorded(rig: Rig, tables: SlotTables) -> Drafter:
        return Recorded(head(rig, tables), tables, made)

    await engines.make(Drafts(3, 0.0, recorded), 0).answers(jobs(), retract)
    guesses = Guesses(name, tiny, spec_of(tiny.path))
    full = 0
    with torch.no_grad():
        for prompt, length, last, seed, room, drafts, *_ in made:
            run, tokens = texts[prompt].run, texts[prompt].tokens
            text = torch.tensor([*run.prompt.tolist(), *tokens])
            assert text[length] == last
            assert not drafts or length + len(drafts) < room + guesses.free
            full += len(drafts) == 3
            if not drafts:
                continue
            fused, known = guesses.fused(text)[:length], text[: length + 1]
            for at, row in enumerate(guesses.logits(fused, known, drafts)):
                if run.params.temperature:
                    key = row_keys(np.array([seed]), np.array([length + 1 + at]))[0]
                    row = row - exponential(bits(key, torch.arange(VOCAB, dtype=torch.int32))).log()
                # EAGLE has no last norm: its logits reach 40,000 here.
                assert row[drafts[at]] >= row.max() - 1e-3 - 2e-5 * row.max().abs()
    assert full > len(made) / 3


@pytest.mark.parametrize("name", ["eagle3", "eagle3.1"])
async def test_a_tree_has_the_likeliest_paths(
    engines: Engines, tiny: Tiny, tmp_path: Path, name: str
) -> None:
    """How likely each is, a forward of the path alone says."""
    texts = {answer.run.prompt.tobytes(): answer for answer in (await engines.plain(jobs())).values()}
    made, tree = list[Made](), Tree(3, 2, 7)
    head = drafters.head(name, tmp_path, tree=tree)

    def recorded(rig: Rig, tables: SlotTables) -> Drafter:
        return Recorded(head(rig, tables), tables, made)

    await engines.make(Drafts(tree.nodes, 0.0, recorded, trees=True), 0).answers(jobs())
    guesses, deep = Guesses(name, tiny, spec_of(tiny.path)), 0
    with torch.no_grad():
        for prompt, length, _, seed, room, drafts, survival, ancestors in made[::3]:
            if length + (tree.steps - 1) * tree.topk >= room:
                continue
            assert len(drafts) == tree.nodes and survival == sorted(survival, reverse=True)
            run, tokens = texts[prompt].run, texts[prompt].tokens
            known = torch.tensor([*run.prompt.tolist(), *tokens])[: length + 1]
            fused = guesses.fused(torch.tensor([*run.prompt.tolist(), *tokens]))[:length]
            for node in range(1, 1 + tree.nodes):
                nodes = [each for each in range(1, node + 1) if ancestors[node - 1] >> (node - each) & 1]
                path, share = [drafts[each - 1] for each in nodes], 1.0
                for at, row in enumerate(guesses.logits(fused, known, path)):
                    if run.params.temperature:
                        key = row_keys(np.array([seed]), np.array([length + 1 + at]))[0]
                        row = row - exponential(bits(key, torch.arange(VOCAB, dtype=torch.int32))).log()
                    best = row.topk(tree.topk).values[-1]
                    assert row[path[at]] >= best - 1e-3, "not among the best successors"
                    share *= float(row.softmax(0)[path[at]])
                assert survival[node - 1] == pytest.approx(share, rel=1e-2, abs=1e-6)
                deep += len(path) == tree.steps
    assert deep > 10


def test_nothing_stands_behind_a_prompt_without_output() -> None:
    """The last chunk of such a prompt samples no token, like a chunk that ends before its prompt does."""
    prompts = {1: ints([5, 6]), 2: ints([7, 8, 9])}
    new = tuple(NewSlot(slot, GREEDY, prompt, NO_TOKENS, 0) for slot, prompt in prompts.items())
    chunks = (Chunk(1, 0, ints([5, 6]), False), Chunk(2, 0, ints([7, 8]), False))
    successors = Successors(4, torch.device("cpu"))
    successors.prepare(StepPlan(0, NO_TOKENS, chunks, new))
    assert successors._tokens.tolist() == [-1, 9, -1, -1]
