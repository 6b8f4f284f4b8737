"""Runs requests through the real scheduler and a real executor, without an event loop."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from app.compose import load_executors
from app.settings import parse
from core.cache.manager import CacheManager
from core.clock import monotonic
from core.command import Action, Command, CommandDone
from core.config import ScheduleConfig
from core.executor import Executor
from core.grammar import CompiledGrammar
from core.plan import PromptLogprobs, StepResult
from core.request import Request, SamplingParams
from core.schedule.scheduler import Scheduler
from core.stats import DraftStatistics
from core.types import Floats, RootKey
from tests.rigs.wait import PATIENCE

Prompt = Sequence[int] | Floats


def serve(path: Path, flags: str) -> Driver:
    """A driver of the executor of a server of the model at `path`, with few rows of short texts."""
    (path / "tokenizer.json").write_text("{}")  # has to be there; an executor needs none
    few = "--device cpu --context-length 160 --page-size 4 --step-tokens 32 --max-running 4"
    config = parse(
        ["--model", str(path), *f"{few} --conservativeness 0.01 --prefill-weight 0 {flags}".split()]
    )
    (made,) = load_executors(config, lambda stage, share: None)
    return Driver(made, config.schedule)


class Answer(NamedTuple):
    """The output of a request: `logprobs` of the sampled tokens, `margins` between the best two of each step,
    and log-probabilities of the `prompt`."""

    tokens: list[int]
    logprobs: list[float]
    margins: list[float]
    prompt: list[PromptLogprobs]


class Driver:
    """Runs lists of requests until they finish, with drafts in each step that may have some. The test must
    close it."""

    def __init__(self, executor: Executor, schedule: ScheduleConfig, radix: bool = True) -> None:
        # Without costs the scheduler drafts in each step. With them a tiny draft model never pays on a GPU.
        caps = msgspec.structs.replace(executor.capabilities, costs=None)
        self._executor = executor
        self._depth = schedule.overlap_depth
        self._arrived = threading.Semaphore(0)
        cache = CacheManager(caps.num_pages, caps.page_size, radix=radix).with_checkpoints(caps.checkpoints)
        self.scheduler = Scheduler(caps, cache, schedule, monotonic)
        executor.start(self._arrived.release)
        self.drafts = DraftStatistics([0] * caps.max_drafts)
        self._made = 0
        self._commands: list[str] = []
        self._placing = 0

    def load(self, adapter: str, path: Path) -> None:
        """Read an adapter to the host."""
        self._carry_out("adapter_read", path, adapter)

    def reload(self, path: Path) -> None:
        """Run the weights of another checkpoint from now on."""
        self._carry_out("load_weights", path)

    def _carry_out(self, action: Action, path: Path, adapter: str = "") -> None:
        self._commands.append("")
        self._executor.command(
            Command(id=len(self._commands), action=action, adapter=adapter, path=str(path))
        )
        assert self._arrived.acquire(timeout=PATIENCE), "no answer arrived"
        (done,) = self._executor.results()
        assert isinstance(done, CommandDone) and done.error is None

    def run(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        grammars: Sequence[CompiledGrammar | None] = (),
        adapters: Sequence[str] = (),
    ) -> list[Answer]:
        """Run all requests, starting one in each iteration. A prompt is token ids, or embeddings. The first
        requests have `grammars` and `adapters`, "" for none."""
        requests = [self._request(p, s) for p, s in zip(prompts, params, strict=True)]
        for request, adapter in zip(requests, adapters, strict=False):
            request.root = RootKey(adapter=adapter)
        for request, grammar in zip(requests, grammars, strict=False):
            request.grammar = grammar
        answers = {request.id: Answer([], [], [], request.prompt_logprobs) for request in requests}
        waiting = list(requests)
        while waiting or not self.scheduler.idle:
            if waiting:
                self.scheduler.add([waiting.pop(0)])
            self._turn(answers)
        self.scheduler.check_integrity()
        return [answers[request.id] for request in requests]

    def close(self) -> None:
        self._executor.close()

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        self._made += 1
        id = f"r{self._made}"
        if not isinstance(prompt, np.ndarray):
            return Request(id, np.asarray(prompt, np.int32), params)
        request = Request(id, np.zeros(len(prompt), np.int32), params, root=RootKey(own=id))
        request.embeds = prompt
        return request

    def _turn(self, answers: dict[str, Answer]) -> None:
        while self.scheduler.may_plan(self._depth) and (plan := self.scheduler.plan()) is not None:
            self._executor.submit(plan)
        self.scheduler.take_finished()
        for adapter, place in self.scheduler.places.take_due():
            self._commands.append(adapter)
            self._placing += 1
            self._executor.command(
                Command(id=len(self._commands), action="adapter_place", adapter=adapter, place=place)
            )
        if not self.scheduler.in_flight and not self._placing:
            return
        assert self._arrived.acquire(timeout=PATIENCE), "no result arrived"
        for result in self._executor.results():
            if isinstance(result, CommandDone):
                assert result.error is None
                self._placing -= 1
                self.scheduler.places.placed(self._commands[result.id - 1])
                continue
            assert isinstance(result, StepResult), result
            if result.drafted is not None:
                self.drafts.add(result.drafted, result.counts)
            confirmed = self.scheduler.apply(result)
            for row, (request, token) in enumerate(zip(confirmed.requests, confirmed.tokens, strict=True)):
                answer = answers[request.id]
                answer.tokens.append(token)
                if (logprobs := confirmed.logprobs.get(row)) is not None:
                    answer.logprobs.append(logprobs.chosen)
                    if len(logprobs.top_values) > 1:
                        answer.margins.append(float(logprobs.top_values[0] - logprobs.top_values[1]))
