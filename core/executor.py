"""The executor: the interface between scheduling and execution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from core.adapters import AdapterLimits
from core.command import Command, CommandDone
from core.costs import ChunkCosts, StepCosts
from core.plan import MASKED_DRAFTS, StepFailure, StepPlan, StepResult


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of an executor. Page 0 and slot 0 are dumps and not counted as usable."""

    num_pages: int
    """Pages in the pool, the dump included: usable ids are 1 ... num_pages - 1."""
    page_size: int
    max_rows: int
    """Requests that can run at once: slots are 1 ... max_rows."""
    context_length: int
    vocab_size: int
    max_step_tokens: int
    max_chunks: int = 0
    """Chunks that a step can hold; 0: as many as its tokens."""
    step_sizes: tuple[int, ...] = ()
    """Tokens that steps with chunks are padded to, ascending; empty: they are not."""
    max_drafts: int = 0
    """Draft tokens that a decode row's query may have besides its last token."""
    masked_drafts: int = MASKED_DRAFTS
    """Drafts that the decode rows with grammars may have in a step, together; 0: these rows draft nothing."""
    costs: StepCosts | None = None
    """Costs of steps with and without drafts, by which the number of drafts is chosen; None: always the
    most."""
    chunk_costs: ChunkCosts | None = None
    """Costs of steps with prompt chunks, by which chunks are sized; None: always the largest."""
    max_samples: int = 0
    """Rows of logits that a step can hold, at least `max_rows`; 0: as many as `max_rows`."""
    max_depth: int = 2
    causal: bool = True
    """Causal attention. Without it, as in encoders, a prompt runs whole in one step, and its pages are of no
    use to another request."""
    checkpoints: int | None = None
    """Checkpoints of linear attention's states: 1 ... so many are usable. None: the model has no states."""
    device: str = "cpu"
    dtype: str = ""
    """Dtype of the computation; weights and pages may have a smaller one."""
    weight_dtype: str = ""
    """Dtype of the layers' matrices."""
    kv_dtype: str = ""
    attention_backend: str = ""
    """Backends in use, in the form that `--attention-backend` takes; `torch` on a CPU."""
    memory: tuple[str, ...] = ()
    """What the device's memory holds, one phrase a part, as `weights 1.5 GiB`."""
    processors: tuple[str, ...] = ()
    """Names of the logit processors that requests may ask for."""
    adapters: AdapterLimits | None = None
    """None where no LoRA adapters can be loaded."""


class Executor(Protocol):
    """Runs plans in the order they were submitted, each on all of its ranks: devices that hold the model
    together.

    Owner: event loop. `submit` never blocks. A result or failure is handed out once, in order;
    after a `StepFailure` nothing follows.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    def start(self, wake: Callable[[], None]) -> None:
        """Begin. `wake` may be called from any thread whenever results have arrived."""
        ...

    def submit(self, plan: StepPlan) -> None: ...

    def command(self, command: Command) -> None:
        """Carry out a command after the plans submitted so far and before those that follow."""
        ...

    def results(self) -> list[StepResult | StepFailure | CommandDone]:
        """Results that arrived since the last call, oldest first; does not wait."""
        ...

    def close(self) -> None:
        """Finish submitted steps, then stop every thread. Idempotent."""
        ...
