"""A whole engine with drafts in one thread: what arrives, ends and is retracted is drawn by a seed."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from app.engine.job import Job, Keep, Piece, TextOptions
from app.engine.loop import Engine
from app.engine.replicas import Replicas
from app.engine.submit import LiveRun, Submitter
from app.text.tokenizer import Tokenizer
from core.cache.manager import CacheManager
from core.command import Command, CommandDone
from core.config import ScheduleConfig
from core.costs import ChunkCosts, CostTable
from core.executor import Capabilities
from core.grammar import GrammarCompiler, GrammarSpec
from core.plan import MASKED_DRAFTS, StepFailure, StepPlan, StepResult
from core.request import SamplingParams
from core.schedule.scheduler import Scheduler
from core.types import Finish, FinishReason
from gpu.runner import ModelRunner
from gpu.state.entry import Limits
from gpu.step.rings import Entries
from gpu.thread import device_thread
from tests.rigs.drafting import DraftingRunner, Drafts
from tests.rigs.processors import KNOWN
from tests.rigs.runner import CPU, Rig
from tests.rigs.scheduler import Clock
from tests.rigs.tiny_model import VOCAB

CONTEXT = 120
"""Tokens of a text at most: prompts of up to 80, and answers of up to 40."""

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 12},
    {"temperature": 1.2, "min_p": 0.02, "logprobs": 0},
    {"frequency_penalty": 0.8, "presence_penalty": 0.4},
    {"temperature": 0.0, "repetition_penalty": 1.4},
    {"logit_bias": ((11, 4.0), (12, -100.0)), "frequency_penalty": 1.5},
    {"stop_ids": frozenset(range(0, VOCAB, 12))},
    {"stop_ids": frozenset(range(0, VOCAB, 3)), "min_tokens": 6},
    {"temperature": 0.0, "prompt_logprobs": 1},
    {"temperature": 0.0, "processor": "only", "processor_params": '{"token": 60}'},
)
OTHERS: tuple[dict[str, Any], ...] = (
    {"text": TextOptions(stop=tuple(map(chr, range(97, 103))))},
    {"text": TextOptions(stop=("never", "ab"), include_stop=True)},
    {"grammar": GrammarSpec("regex", "[0-9]{2,20}")},
    {"grammar": GrammarSpec("regex", "[a-z]*")},
    {"allowed_ids": tuple(range(4, 200))},
    {"keep": Keep(marks=((None, 5.0),))},
    {"n": 2},
)


def some_jobs(rng: random.Random, count: int) -> list[Job]:
    """Requests of every kind, many of whose prompts begin with the same tokens, or repeat themselves."""
    stems = [[rng.randrange(4, VOCAB) for _ in range(72)] for _ in range(4)]
    stems.append([rng.randrange(4, VOCAB) for _ in range(5)] * 14)
    found = []
    for at in range(count):
        stem = rng.choice(stems)
        ends = [rng.randrange(4, VOCAB) for _ in range(rng.choice((0, 1, 1, 2, 7)))]
        shared = stem[: rng.choice((0, 1, 8, 16, 31, 32, 33, 47, 64, 72))]
        prompt = np.asarray([*shared, *ends] or [9], np.int32)
        more: dict[str, Any] = {"sampling": SamplingParams(**rng.choice(KINDS))}
        if rng.random() < 0.3:
            more |= rng.choice(OTHERS)
        least = more["sampling"].min_tokens
        length = max(least, rng.choice((1, 2, 3, 7, 20, 40))) if rng.random() < 0.9 else None
        more |= {"priority": rng.choice((0, 0, 5, 20)), "ignore_eos": rng.random() < 0.8}
        found.append(Job(id=str(at), prompt=prompt, max_tokens=length, seed=at, **more))
    return found


CHUNKS = ChunkCosts(CostTable((1, 64), (1e-3, 64e-3)), 0.0)
"""A token takes a millisecond."""


class Text(NamedTuple):
    """A choice as a client gets it."""

    text: str
    tokens: list[int]
    finish: Finish


class Setup(NamedTuple):
    """Sizes of an engine, and what it drafts."""

    drafts: Drafts
    overlap: int = 1
    page: int = 4
    pages: int = 60
    rows: int = 6
    step_tokens: int = 48
    samples: int = 40
    order: str = "fcfs"
    target: float = 0.0


ALONE = Setup(Drafts(0, 0.0), overlap=0)


class Inline:
    """`core.executor.Executor` over a runner in the loop's own thread. How many of the steps in flight end
    before the loop hears of them is drawn; `check` is called in between."""

    def __init__(
        self,
        runner: DraftingRunner,
        capabilities: Capabilities,
        rng: random.Random,
        check: Callable[[], None],
    ) -> None:
        self.capabilities, self.steps = capabilities, 0
        self._runner, self._rng, self._check = runner, rng, check
        self._plans: deque[StepPlan] = deque()
        self._done: list[StepResult | StepFailure | CommandDone] = []
        self._wake: Callable[[], None] = lambda: None
        self._due = False

    def start(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)
        self._soon()

    def command(self, command: Command) -> None:
        raise AssertionError("no commands here")

    def results(self) -> list[StepResult | StepFailure | CommandDone]:
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        self._runner.close()

    def _soon(self) -> None:
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._work)

    def _work(self) -> None:
        self._due = False
        with device_thread(CPU):
            for _ in range(self._rng.randint(1, len(self._plans))):
                self._done.append(self._runner.launch(self._plans.popleft()).wait())
                self.steps += 1
        self._check()
        self._wake()
        if self._plans:
            self._soon()


class RandomEngine:
    """An engine over a tiny model, driven by a seed."""

    def __init__(
        self,
        path: Path,
        setup: Setup,
        texts: Mapping[bytes, Sequence[int]],
        tokenizer: Tokenizer,
        grammars: GrammarCompiler,
        seed: int = 0,
    ) -> None:
        drafts, rows, pages = setup.drafts, setup.rows, setup.pages
        rig = Rig(path, setup.page, rows, setup.page * pages)
        width = -(-CONTEXT // setup.page)
        limits = Limits(
            rows,
            rows,
            setup.step_tokens,
            64,
            width,
            samples=setup.samples,
            drafts=drafts.depth,
            trees=drafts.trees,
        )
        shape = rig.runner.shape._replace(
            tokens=setup.step_tokens, drafts=drafts.depth, pages=width, trees=drafts.trees
        )
        make = None if drafts.drafter is None else partial(drafts.drafter, rig)
        runner = ModelRunner(shape, rig.runner._machine, Entries(limits, 4, CPU), KNOWN, drafter=make)
        with device_thread(CPU):
            runner.use_model(rig.model)
            runner.use_pool(rig.pool)
            runner.prepare()
        drafting = DraftingRunner(runner, drafts, texts, VOCAB)
        drafting.loop = asyncio.get_running_loop()
        capabilities = Capabilities(
            num_pages=pages + 1, page_size=setup.page, max_rows=rows, context_length=CONTEXT,
            vocab_size=VOCAB, max_step_tokens=setup.step_tokens, max_drafts=drafts.depth,
            max_samples=setup.samples, max_chunks=rows, processors=tuple(KNOWN),
            masked_drafts=0 if drafts.trees else MASKED_DRAFTS, chunk_costs=CHUNKS,
        )  # fmt: skip
        schedule = {"overlap_depth": setup.overlap, "order": setup.order, "itl_target": setup.target}
        if not setup.target:
            schedule["prefill_weight"] = 0.0  # else plans depend on how busy this machine is
        config = msgspec.convert(schedule, ScheduleConfig)
        self.clock, self.most = Clock(), drafting.most
        cache = CacheManager(pages + 1, setup.page)
        self.scheduler = Scheduler(capabilities, cache, config, self.clock)
        self._rng = random.Random(seed)
        self._executor = Inline(drafting, capabilities, self._rng, self._stepped)
        self._engine = Engine(self.scheduler, self._executor, setup.overlap, self.clock)
        self._submitter = Submitter(Replicas([self._engine]), tokenizer, self.clock, grammars)
        self._engine.start(drafting.loop)

    @property
    def steps(self) -> int:
        return self._executor.steps

    def _stepped(self) -> None:
        self.clock.now += 0.01
        self.scheduler.check_integrity()

    async def alone(self, job: Job) -> list[Text]:
        """The choices of a request that runs alone."""
        started = await self._start(job)
        await started.run.wait()
        return started.texts()

    async def play(self, jobs: Sequence[Job], steps: int, expect: Mapping[str, list[Text]]) -> int:
        """Draw from `jobs` for `steps` steps and until somebody was sent back to the queue, and let what then
        runs end. Each request's text must be what `expect` has for its job, and its beginning where it is
        aborted. Returns how many were not."""
        rng, live, ended, numbers = self._rng, list[_Started](), 0, itertools.count()
        # Texts differ between processors, and with them how long it takes until a retraction is drawn while
        # requests run: 250 steps were too few once in ten times.
        while self.steps < steps or not self.scheduler.statistics().retractions:
            assert self.steps < 50 * steps
            while len(live) < 12 and rng.random() < 0.6:
                job = rng.choice(jobs)
                live.append(await self._start(msgspec.structs.replace(job, id=f"{job.id} {next(numbers)}")))
            if live and rng.random() < 0.06:
                rng.choice(live).abort(rng)
            if rng.random() < 0.02:
                self._engine.retract_all()
            for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 8))):
                await asyncio.sleep(0)
            assert self._engine.failure is None, self._engine.failure
            ended += sum(each.check(expect) for each in live)
            live = [each for each in live if not each.over]
        for each in live:
            await each.run.wait()
            ended += each.check(expect)
        await self.settle()
        return ended

    async def settle(self) -> None:
        """Everything has ended: no page, slot or pin is held by anything."""
        while self.scheduler.in_flight or not self._engine.idle:
            await asyncio.sleep(0)
        assert self._engine.failure is None, self._engine.failure
        self.clock.now += 1000.0  # no prefix is kept any more
        self.scheduler.plan()
        self.scheduler.check_integrity()
        now = self.scheduler.statistics()
        assert (now.running, now.waiting, now.in_flight) == (0, 0, 0)
        assert now.cache.free + now.cache.cached == now.cache.total, now.cache
        assert now.cache.protected == 0, now.cache
        self._engine.flush()
        self.scheduler.check_integrity()
        now = self.scheduler.statistics()
        assert now.cache.free == now.cache.total, now.cache

    def close(self) -> None:
        with device_thread(CPU):
            self._engine.close()

    async def _start(self, job: Job) -> _Started:
        pieces: list[list[Piece]] = [[] for _ in range(job.n)]
        run = await self._submitter.start(job, lambda index, piece: pieces[index].append(piece))
        assert isinstance(run, LiveRun)
        return _Started(job, run, pieces)


class _Started:
    """A request, and what its client has."""

    def __init__(self, job: Job, run: LiveRun, pieces: list[list[Piece]]) -> None:
        self.run, self.over = run, False
        self._job, self._pieces = job, pieces

    def abort(self, rng: random.Random) -> None:
        """All of it, or one choice."""
        if rng.random() < 0.5:
            self.run.abort()
        else:
            self.run.end(rng.randrange(self._job.n))

    def texts(self) -> list[Text]:
        """Texts of the request's choices, all ended."""
        found = []
        for pieces in self._pieces:
            finish = pieces[-1].finish
            assert finish is not None
            assert sum(each.finish is not None for each in pieces) == 1
            tokens = [token for each in pieces for token in each.tokens]
            found.append(Text("".join(each.text for each in pieces), tokens, finish))
        return found

    def check(self, expect: Mapping[str, list[Text]]) -> int:
        """Once it has ended, its text; returns the choices that were not aborted."""
        if self.over or not all(each and each[-1].finish for each in self._pieces):
            return 0
        self.over, whole = True, 0
        job = self._job
        for got, want in zip(self.texts(), expect[job.id.split()[0]], strict=True):
            if got.finish.reason is FinishReason.ABORT:
                assert want.tokens[: len(got.tokens)] == got.tokens, (job, got, want)
                # The end may be half a character.
                assert want.text.startswith(got.text.rstrip("\ufffd")), (job, got, want)
            else:
                whole += 1
                assert got == want, job
        return whole
