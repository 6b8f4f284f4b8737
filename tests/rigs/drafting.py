"""A whole engine on a CPU whose decode rows have drafts: right ones, wrong ones and both."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from app.engine.job import Job, Piece
from app.engine.loop import Engine
from app.engine.replicas import Replicas
from app.engine.submit import LiveRun, Submitter
from app.text.tokenizer import Tokenizer
from core.cache.manager import CacheManager
from core.clock import monotonic
from core.command import Command, CommandDone
from core.config import ScheduleConfig
from core.executor import Capabilities
from core.grammar import GrammarCompiler
from core.plan import MASKED_DRAFTS, RowLogprobs, StepPlan, StepResult
from core.schedule.scheduler import Scheduler
from core.types import Finish
from gpu.draft.drafter import Drafter
from gpu.executor import LocalExecutor
from gpu.runner import ModelRunner
from gpu.sample.processors import Processor
from gpu.state.entry import Limits
from gpu.state.tables import SlotTables
from gpu.step.launched import LaunchedStep
from gpu.step.machine import Machine
from gpu.step.rings import Entries
from gpu.thread import device_thread
from gpu.worker import Progress
from tests.rigs.runner import CPU, Rig

ROWS, PAGE, STEP_TOKENS, SAMPLES = 6, 4, 48, 40


class Drafts(NamedTuple):
    """Drafts of a row: at most `depth`, each the next token of its text with probability `right`, else
    another; or those of a `drafter` of a runner's tables. `trees`: so many drafts are a tree, in which the
    next token of the text has wrong siblings, whose children may be what would be right elsewhere."""

    depth: int
    right: float
    drafter: Callable[[Rig, SlotTables], Drafter] | None = None
    trees: bool = False


class Watched:
    """A launched step. `most` learns how many tokens its rows have, by prompt."""

    def __init__(self, launched: LaunchedStep, prompts: list[bytes], most: dict[bytes, int]) -> None:
        self.step, self._launched, self._prompts, self._most = launched.step, launched, prompts, most

    def wait(self) -> StepResult:
        result = self._launched.wait()
        counts = [1] * len(self._prompts) if result.counts is None else result.counts.tolist()
        for prompt, count in zip(self._prompts, counts, strict=True):
            self._most[prompt] = max(self._most.get(prompt, 0), count)
        return result


class DraftingRunner:
    """A runner that writes drafts to the tables ahead of every step, as a proposer would behind one."""

    device = CPU

    def __init__(
        self, runner: ModelRunner, drafts: Drafts, texts: Mapping[bytes, Sequence[int]], vocab: int
    ) -> None:
        """`texts` by prompt, whose bytes are the key: what its tokens will be."""
        self.plans: list[StepPlan] = []
        self.stepped = asyncio.Event()
        """Set at every launch, on `loop`."""
        self.loop: asyncio.AbstractEventLoop | None = None
        self.most: dict[bytes, int] = {}
        """The most tokens that each prompt's row had of one step, by prompt."""
        self._runner, self._drafts, self._texts, self._vocab = runner, drafts, texts, vocab
        self._prompts: dict[int, np.ndarray] = {}
        self._random = random.Random(drafts.depth)

    def prepare(self, progress: Progress) -> None:
        self._runner.prepare(progress)

    def launch(self, plan: StepPlan) -> Watched:
        self.plans.append(plan)
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self.stepped.set)
        tables = self._runner.tables
        given = self._drafts.depth and self._drafts.drafter is None
        for slot in plan.decode_slots.tolist() if given else ():
            drafts = self._propose(slot, int(tables.length[slot]) + 1)
            if tables.ancestors is not None:
                drafts, masks = self._branch(drafts)
                tables.ancestors[slot] = torch.tensor(masks)
            tables.drafts[slot] = torch.tensor([self._random.randint(0, len(drafts)), *drafts])
        self._prompts |= {new.slot: new.prompt for new in plan.new_slots}
        prompts = [self._prompts[slot].tobytes() for slot in plan.sampling_slots.tolist()]
        return Watched(self._runner.launch(plan), prompts, self.most)

    def _propose(self, slot: int, position: int) -> list[int]:
        """Drafts for the tokens from `position` on."""
        prompt, depth, right = self._prompts[slot], self._drafts.depth, self._drafts.right
        ahead = self._texts[prompt.tobytes()][position - len(prompt) :][:depth]
        known = [*ahead, *[0] * (depth - len(ahead))]
        others = (self._random.randrange(1, self._vocab) * (self._random.random() >= right) for _ in known)
        return [(token + other) % self._vocab for token, other in zip(known, others, strict=True)]

    def _branch(self, chain: Sequence[int]) -> tuple[list[int], list[int]]:
        """A tree of as many drafts as `chain`, with the first ones of `chain` on one of its paths; and the
        ancestors of each, as `SlotTables.ancestors`."""
        rng, ids, masks, depths, end = self._random, [0], [-1], [0], 0
        for node in range(1, 1 + len(chain)):
            if rng.random() < 0.5:
                parent, token = end, chain[depths[end]]
            else:
                parent = rng.choice((end, rng.randrange(node)))
                wrong = rng.randrange(1, self._vocab) if parent == end or rng.random() < 0.5 else 0
                token = (chain[depths[parent]] + wrong) % self._vocab
            ids.append(token)
            masks.append(masks[parent] << (node - parent) | 1)
            depths.append(depths[parent] + 1)
            if parent == end and token == chain[depths[end]]:
                end = node
        return ids[1:], masks[1:]

    def carry_out(self, command: Command) -> CommandDone:
        return self._runner.carry_out(command)

    def close(self) -> None:
        self._runner.close()


class Answer(NamedTuple):
    """An answer as a client gets it."""

    run: LiveRun
    pieces: list[Piece]

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def tokens(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.tokens]

    @property
    def logprobs(self) -> list[RowLogprobs]:
        return [each for piece in self.pieces for each in piece.logprobs or ()]

    @property
    def finish(self) -> Finish | None:
        return self.pieces[-1].finish


class Drafting:
    """An engine over a tiny model."""

    def __init__(
        self,
        path: Path,
        drafts: Drafts,
        overlap: int,
        texts: Mapping[bytes, Sequence[int]],
        tokenizer: Tokenizer,
        grammars: GrammarCompiler,
        processors: Mapping[str, Processor],
        machine: Callable[[Rig], Machine],
    ) -> None:
        pages = 240
        rig = Rig(path, PAGE, ROWS, PAGE * pages, drafts=drafts.depth)
        shape, width = rig.runner.shape, pages + 1
        limits = Limits(
            ROWS, ROWS, STEP_TOKENS, 64, width, samples=SAMPLES, drafts=drafts.depth, trees=drafts.trees
        )
        shape = shape._replace(tokens=STEP_TOKENS, drafts=drafts.depth, trees=drafts.trees)
        make = None if drafts.drafter is None else partial(drafts.drafter, rig)
        runner = ModelRunner(shape, machine(rig), Entries(limits, 4, CPU), processors, drafter=make)
        self.tables = runner.tables
        with device_thread(CPU):
            runner.use_model(rig.model)
            runner.use_pool(rig.pool)
        vocab = rig.spec.vocab_size
        self.runner = DraftingRunner(runner, drafts, texts, vocab)
        capabilities = Capabilities(
            num_pages=pages + 1, page_size=PAGE, max_rows=ROWS, context_length=256, vocab_size=vocab,
            max_step_tokens=STEP_TOKENS, max_drafts=drafts.depth, max_samples=SAMPLES,
            masked_drafts=0 if drafts.trees else MASKED_DRAFTS, processors=tuple(processors),
            checkpoints=None if rig.spec.linear is None else 8,
        )  # fmt: skip
        executor = LocalExecutor([self.runner], capabilities)
        executor.prepare(lambda share: None)
        cache = CacheManager(pages + 1, PAGE).with_checkpoints(capabilities.checkpoints)
        config = ScheduleConfig(overlap_depth=overlap)
        self.scheduler = Scheduler(capabilities, cache, config, monotonic)
        self._engine = Engine(self.scheduler, executor, overlap, monotonic)
        replicas = Replicas([self._engine])
        # Who waits for a step must not wait for ever when there will be none.
        replicas.on_failure = lambda reason: self.runner.stepped.set()
        self._submitter = Submitter(replicas, tokenizer, monotonic, grammars)

    async def answers(
        self, jobs: Sequence[Job], retract: bool = False, abort: int = 0, alone: bool = False
    ) -> list[Answer]:
        """All of them: the next one comes a step or two after the one before it, or where each is `alone`,
        when that has ended. It may send all that run back to the queue, or `abort` the one that came so many
        before it."""
        self.runner.loop = asyncio.get_running_loop()
        self._engine.start(self.runner.loop)
        found = []
        for job in jobs:
            found.append(await self._start(job))
            if retract:
                self._engine.retract_all()
            if abort and len(found) > abort:
                found[-1 - abort].run.abort()
            if alone:
                await found[-1].run.wait()
        for answer in found:
            await answer.run.wait()
        await self._engine.quiet()
        self._engine.check_integrity()
        self._engine.close()
        return found

    async def _start(self, job: Job) -> Answer:
        pieces: list[Piece] = []
        run = await self._submitter.start(job, lambda index, piece: pieces.append(piece))
        assert isinstance(run, LiveRun)
        if self._engine.failure is None:  # else no step sets it
            self.runner.stepped.clear()
            await self.runner.stepped.wait()
        return Answer(run, pieces)
