"""A device without a model: a page holds, for each token, a hash of everything before it.

A row's next token depends on the hash at its last position and on the one halfway, both read through its page
table: a wrong page, a stale prefix or a page that was reused too early changes the text. The expected output
of a prompt can be computed (`expected_output`). Steps are vectorised, so thousands of streams are cheap.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from core.command import Command, CommandDone
from core.config import CacheConfig, ModelConfig, ScheduleConfig
from core.executor import Capabilities
from core.models import ModelSpec
from core.plan import StepPlan, StepResult
from gpu.executor import LocalExecutor

MODULUS = 2_147_483_647
FACTOR = 48_271
START = 17
LOWEST = 32
"""Ids below are control bytes and end-of-sequence tokens: outputs contain printable characters only."""
HIGHEST = 127
ROWS = 512


def expected_output(prompt: Iterable[int], length: int) -> list[int]:
    """The output of `length` tokens for a prompt."""
    hashes: list[int] = []
    for token in prompt:
        hashes.append(_next(hashes[-1] if hashes else START, token))
    output: list[int] = []
    while len(output) < length:
        last = len(hashes) - 1
        output.append(_token(hashes[last], hashes[last // 2]))
        hashes.append(_next(hashes[last], output[-1]))
    return output


def _next(before: int, token: int) -> int:
    return (before * FACTOR + token + 1) % MODULUS


def _token(last: int, halfway: int) -> int:
    return LOWEST + (last + 7 * halfway) % (HIGHEST - LOWEST)


class FinishedStep:
    """A launched step; it is finished at launch."""

    def __init__(self, result: StepResult) -> None:
        self.step = result.step
        self._result = result

    def wait(self) -> StepResult:
        """The result."""
        return self._result


class CountingRunner:
    """`gpu.worker.Runner` over arrays. Owner: the launch thread."""

    device = torch.device("cpu")

    def __init__(self, capabilities: Capabilities) -> None:
        pages = -(-capabilities.context_length // capabilities.page_size)
        self._size = capabilities.page_size
        self._pool = np.full((capabilities.num_pages, self._size), -1, np.int64)
        self._table = np.zeros((capabilities.max_rows + 1, pages), np.int32)
        self._length = np.zeros(capabilities.max_rows + 1, np.int64)
        self._cell = np.zeros(capabilities.max_rows + 1, np.int64)

    def launch(self, plan: StepPlan) -> FinishedStep:
        """Run a step."""
        for new in plan.new_slots:
            self._length[new.slot] = new.cached
        writes = plan.page_writes
        self._table[writes.slots, writes.indices] = writes.pages
        rows = np.asarray(plan.decode_slots)
        if len(rows):
            at = self._length[rows]
            self._write(rows, at, (self._read(rows, at - 1) * FACTOR + self._cell[rows] + 1) % MODULUS)
            self._length[rows] += 1
        for chunk in plan.chunks:
            self._prefill(chunk.slot, chunk.start, chunk.tokens.tolist())
        slots = plan.sampling_slots
        last = self._length[slots] - 1
        hashes = self._read(slots, last), self._read(slots, last // 2)
        tokens = np.where(np.minimum(*hashes) < 0, -1, _tokens(*hashes))
        self._cell[slots] = tokens
        return FinishedStep(StepResult(plan.step, tokens.astype(np.int32)))

    def _prefill(self, slot: int, start: int, tokens: list[int]) -> None:
        assert self._length[slot] == start
        before = int(self._read(np.full(1, slot), np.array([start - 1]))[0]) if start else START
        hashes = []
        for token in tokens:
            before = _next(before, token)
            hashes.append(before)
        positions = np.arange(start, start + len(tokens))
        self._write(np.full(len(tokens), slot), positions, np.array(hashes))
        self._length[slot] = start + len(tokens)

    def _read(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        pages = self._table[slots, positions // self._size]
        hashes: np.ndarray = self._pool[pages, positions % self._size]
        return hashes

    def _write(self, slots: np.ndarray, positions: np.ndarray, values: np.ndarray) -> None:
        self._pool[self._table[slots, positions // self._size], positions % self._size] = values

    def prepare(self, progress: object) -> None:
        """Nothing to prepare."""

    def carry_out(self, command: Command) -> CommandDone:
        """Do nothing."""
        return CommandDone(command.id)

    def close(self) -> None:
        """Nothing to release."""


def _tokens(last: np.ndarray, halfway: np.ndarray) -> np.ndarray:
    tokens: np.ndarray = LOWEST + (last + 7 * halfway) % (HIGHEST - LOWEST)
    return tokens


def build_executor(
    spec: ModelSpec,
    source: object,
    model: ModelConfig,
    cache: CacheConfig,
    schedule: ScheduleConfig,
    progress: object,
    drafting: object,
) -> LocalExecutor:
    """Replaces `gpu.build.build_executor`."""
    context = model.context_length or spec.context_length
    rows = schedule.max_running or ROWS
    tokens = cache.kv_tokens or rows * context
    sizes = Capabilities(
        num_pages=tokens // cache.page_size + 1,
        page_size=cache.page_size,
        max_rows=rows,
        context_length=min(context, tokens),
        vocab_size=spec.vocab_size,
        max_step_tokens=schedule.step_tokens or 8192,
    )
    return LocalExecutor([CountingRunner(sizes)], sizes)
