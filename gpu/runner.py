"""One step on one device. Knows the order of things, and neither models nor features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from core.clock import monotonic
from core.command import Command, CommandDone
from core.plan import NewSlot, RowLogprobs, StepPlan, StepResult
from core.types import NAN_TOKEN
from gpu.attention import AttentionBackend
from gpu.context import ForwardContext
from gpu.embeds import embedded
from gpu.grammar.matchers import Masks, Matchers
from gpu.hidden import Given, HiddenRows, segments
from gpu.inputs import gather
from gpu.kv.pool import KvPool
from gpu.models.base import CausalModel
from gpu.ops.plain import TorchOps
from gpu.prompt import score_prompts
from gpu.sample.logprobs import PromptScores
from gpu.state.slots import SlotState
from gpu.thread import assert_device_thread
from gpu.upkeep import Upkeep


class Sampled(Protocol):
    """What a sampler made: tokens int64 [n], -1 where logits were not finite; why, by row, where there
    is a reason that the row's client should know."""

    @property
    def tokens(self) -> torch.Tensor: ...

    @property
    def logprobs(self) -> dict[int, RowLogprobs]: ...

    @property
    def failed(self) -> Mapping[int, str]: ...


class TokenSampler(Protocol):
    """Logits to tokens, by each slot's parameters. Owner: launch thread."""

    def apply(self, new_slots: Sequence[NewSlot]) -> None:
        """Take over the parameters of new slots. Before the forward."""
        ...

    def sample(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, masks: Masks | None
    ) -> Sampled:
        """Choose a token per row: logits float32 [n, vocab], slots and positions int64 [n]; a
        position is that of the token being sampled. `masks` says what constrained rows may take."""
        ...


class Pending:
    """A launched step. `wait` may block, and belongs to the waiter thread."""

    __slots__ = ("_failed", "_given", "_logprobs", "_prompt", "_seconds", "_tokens", "step")

    def __init__(
        self,
        step: int,
        tokens: torch.Tensor,
        logprobs: dict[int, RowLogprobs],
        prompt: dict[int, PromptScores],
        seconds: float,
        failed: dict[int, str],
        given: Given,
    ) -> None:
        self.step = step
        self._tokens = tokens
        self._logprobs = logprobs
        self._prompt = prompt
        self._seconds = seconds
        self._failed = failed
        self._given = given

    def wait(self) -> StepResult:
        """The step's answer. Its arrays are read-only."""
        tokens = self._tokens.cpu().numpy().astype(np.int32)
        tokens.setflags(write=False)
        prompt = {slot: scores.read() for slot, scores in self._prompt.items()}
        told = (self._logprobs, prompt, self._seconds, self._failed)
        return StepResult(self.step, tokens, *told, *self._given.read())


class ModelRunner:
    """Runs plans against one model, its pool and its slots.

    Owner: launch thread. A CPU computes within `launch`; a device that runs on its own will return
    from it early, and only `Pending.wait` knows the difference.
    """

    __slots__ = (
        "_attention",
        "_hidden",
        "_matchers",
        "_model",
        "_page_size",
        "_sampler",
        "_slots",
        "_upkeep",
        "device",
    )

    def __init__(
        self,
        model: CausalModel,
        slots: SlotState,
        attention: AttentionBackend,
        sampler: TokenSampler,
        page_size: int,
        upkeep: Upkeep | None = None,
    ) -> None:
        """Without `upkeep` commands are refused."""
        self._model: CausalModel | None = model
        self._upkeep = upkeep
        self._slots = slots
        self._attention = attention
        self._sampler = sampler
        self._page_size = page_size
        self._matchers = Matchers()
        self._hidden = HiddenRows()
        self.device = slots.length.device

    def launch(self, plan: StepPlan) -> Pending:
        """Apply the plan's writes, gather, forward, sample, leave the tokens in their cells."""
        assert_device_thread(self.device)
        model = self._model
        assert model is not None, "a step came while the weights are given back"
        begun = monotonic()
        self._slots.apply(plan)
        self._sampler.apply(plan.new_slots)
        self._matchers.apply(plan.new_slots)
        self._hidden.apply(plan.new_slots)
        inputs = gather(plan, self._slots, self._page_size)
        self._attention.prepare(inputs)
        ops = TorchOps(self._attention)
        given, routes = embedded(plan, self.device), self._hidden.routes(plan)
        ctx = ForwardContext(inputs.positions, ops, segments(plan, inputs), embedded=given, routes=routes)
        hidden = model.forward(ctx, inputs.ids)
        tokens, logprobs = inputs.sample_slots, dict[int, RowLogprobs]()
        failed: dict[int, str] = {}
        if plan.num_samples:
            logits = model.logits(hidden[inputs.sample_rows])
            # Behind the forward: a device computes while its masks are filled on the host.
            masks = self._matchers.fill(plan)
            sampled = self._sampler.sample(logits, inputs.sample_slots, inputs.sample_positions, masks)
            tokens, logprobs = sampled.tokens, sampled.logprobs
            if masks is not None:
                failed = self._accept(masks, tokens, logprobs)
            failed.update(sampled.failed)
            self._slots.write_tokens(inputs.sample_slots, tokens)
        prompt = score_prompts(model, hidden, plan, inputs.chunks)
        wanted = self._hidden.take(model, hidden, routes, plan, inputs.chunks)
        return Pending(plan.step, tokens, logprobs, prompt, monotonic() - begun, failed, wanted)

    def _accept(self, masks: Masks, tokens: torch.Tensor, logprobs: dict[int, RowLogprobs]) -> dict[int, str]:
        """Move the matchers on; a row whose matcher cannot has no token."""
        failed = self._matchers.accept(masks, tokens.tolist())
        for row in failed:
            tokens[row] = NAN_TOKEN
            logprobs.pop(row, None)
        return failed

    def carry_out(self, command: Command) -> CommandDone:
        """Do what an operator asked between steps."""
        assert_device_thread(self.device)
        if self._upkeep is None:
            return CommandDone(command.id, "this runner takes no commands")
        return self._upkeep.carry_out(command, self)

    def close(self) -> None:
        """See `gpu.worker.Runner`."""
        self.use_model(None)
        self.use_pool(None)

    def use_model(self, model: CausalModel | None) -> None:
        """See `gpu.upkeep.Replaceable`."""
        self._model = model

    def use_pool(self, pool: KvPool | None) -> None:
        """See `gpu.upkeep.Replaceable`."""
        self._attention.bind(pool)
