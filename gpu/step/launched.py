"""A launched step, and when its answer is there."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch

from core.clock import monotonic
from core.plan import StepResult
from core.types import NAN_TOKEN, frozen
from gpu.grammar.matchers import Masks, Matchers
from gpu.hidden import NO_EXTRAS, StepExtras
from gpu.sample.logprobs import PromptScores
from gpu.step.rings import Rings, Ticket
from gpu.step.sampling import Sampled


class Mark(Protocol):
    """A point in a device's work."""

    def wait(self) -> None:
        """Block until the device has passed it; the GIL is free meanwhile."""
        ...

    def seconds_since(self, earlier: Mark) -> float:
        """Time between two marks that have been passed."""
        ...


class EventMark:
    """An event on the current stream. `wait` blocks without spinning: an interrupt of the device wakes it.

    Spinning would take a core for each GPU, and slow the event loop where both share a physical core. On one
    H200 with Qwen3-30B-A3B, sleeping lowers the time to start a request from 0.47 to 0.37 ms and makes 1.2%
    more tokens/s in short512; lat1 makes 465 tokens/s instead of 468
    (`history/h200-waiter-sleeps-qwen3-30b-a3b.json`)."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        make: Any = torch.cuda.Event  # untyped
        self._event = make(enable_timing=True, blocking=True)
        self._event.record()

    def wait(self) -> None:
        """See `Mark.wait`."""
        self._event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        """See `Mark.seconds_since`."""
        assert isinstance(earlier, EventMark)
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class HostMark:
    """A mark for a device that has done its work when the call returns."""

    __slots__ = ("_at",)

    def __init__(self) -> None:
        self._at = monotonic()

    def wait(self) -> None:
        """See `Mark.wait`."""

    def seconds_since(self, earlier: Mark) -> float:
        """See `Mark.seconds_since`."""
        assert isinstance(earlier, HostMark)
        return self._at - earlier._at


def mark(device: torch.device) -> Mark:
    """Mark the present point of the device's work."""
    return EventMark() if device.type == "cuda" else HostMark()


class Answer(NamedTuple):
    """What is read of a launched step when it has ended, beside its tokens."""

    sampled: Sampled = Sampled()
    masks: Masks | None = None
    prompt: Mapping[int, PromptScores] = MappingProxyType({})
    extras: StepExtras = NO_EXTRAS


class Marks(NamedTuple):
    """Marks before a step's first launch and behind its last."""

    began: Mark
    ended: Mark


class LaunchedStep:
    """Owner: launch thread until it is handed to the waiter thread, which calls `wait` once.

    The matchers of a step with constrained rows, and the logit processors, learn of its tokens when they are
    there, on the waiter thread; the launch thread leaves both alone until `settle` returns.
    """

    __slots__ = ("_answer", "_marks", "_matchers", "_rings", "_settled", "_ticket", "step")

    def __init__(
        self, step: int, rings: Rings, ticket: Ticket, marks: Marks, answer: Answer, matchers: Matchers
    ) -> None:
        self.step = step
        self._rings = rings
        self._ticket = ticket
        self._marks = marks
        self._answer = answer
        self._matchers = matchers
        self._settled = threading.Event()

    def wait(self) -> StepResult:
        """The step's answer. Raises what the device raised."""
        try:
            self._marks.ended.wait()
            answer, made = self._answer, self._rings.read(self._ticket)
            failed = dict[int, str]()
            if answer.masks is not None:
                failed = self._matchers.accept(answer.masks, made)
            broken = answer.sampled.processed.failed
            failed |= {at: why for row, why in broken.items() if (at := made.index(row)) >= 0}
            if failed:
                made.tokens[list(failed)] = NAN_TOKEN
            answer.sampled.processed.accept(made.of_rows())
        finally:
            self._settled.set()  # whatever happened: the launch thread must not wait for ever
        hidden, experts = answer.extras.read(made.counts)
        return StepResult(
            step=self.step,
            tokens=frozen(made.tokens),
            counts=made.counts,
            drafted=made.drafted,
            paths=made.paths,
            logprobs=answer.sampled.read(made),
            prompt_logprobs={slot: scores.read() for slot, scores in answer.prompt.items()},
            hidden=hidden,
            experts=experts,
            failed=failed,
            seconds=self._marks.ended.seconds_since(self._marks.began),
        )

    @property
    def settles(self) -> bool:
        """Whether the next step's tokens follow from this one's on the host."""
        return self._answer.masks is not None or bool(self._answer.sampled.processed.rows)

    def settle(self) -> None:
        """Block until matchers and processors know this step's tokens."""
        self._settled.wait()
