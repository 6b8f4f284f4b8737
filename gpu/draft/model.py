"""What the drafters that run a draft model share: its weights, its pages and the rows that get drafts.

A draft model's KV lies in pages of the target's numbers. What the target rejects is overwritten by the tokens
that take its place.

A draft is drawn with the noise of the position it is for, as the target's token will be (`gpu.sample.noise`):
both then take the same token as often as their distributions allow, which for a greedy row is the argmax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from core.plan import StepPlan
from gpu.attention.backend import AttentionBackend
from gpu.context import ForwardContext
from gpu.draft.kernels import DraftKernels
from gpu.kv.pool import KvPool
from gpu.models.base import CausalModel
from gpu.ops.base import Ops
from gpu.state.draft_rows import DraftRows
from gpu.state.tables import SlotTables
from gpu.state.view import StepView


class AnyDraftModel(Protocol):
    """A draft model, of any kind.

    token_ids  int64 [draft vocabulary]: the target's id of each of the draft's; None: the same
    """

    @property
    def token_ids(self) -> Tensor | None: ...

    def retarget(self, target: CausalModel) -> None:
        """Draft for other weights of its target from now on."""
        ...

    def fuse(self, aux: Tensor, ops: Ops | None = None) -> Tensor:
        """What the draft model reads of the target's states."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, draft vocabulary]."""
        ...


Model = TypeVar("Model", bound=AnyDraftModel)


class DraftMachine(NamedTuple):
    """How a draft model is run: `attention` and `ops` of its layers over its own pages, and the `kernels`
    around its forwards. `make_pool` allocates pages of the draft's heads for as many as the target's pool
    has. `pdl` is programmatic dependent launch."""

    attention: AttentionBackend
    ops: Callable[[KvPool], Callable[[StepView], Ops]]
    make_pool: Callable[[KvPool], KvPool]
    kernels: DraftKernels
    pdl: bool = False


class ModelDrafter(Generic[Model]):
    """The part of a `gpu.draft.drafter.Drafter` over a draft model that does not depend on its kind.

    Owner: launch thread.
    """

    keeps_kv = True

    def __init__(
        self,
        load: Callable[[CausalModel], Model],
        machine: DraftMachine,
        tables: SlotTables,
        aux: tuple[int, ...] | None,
        samples: int,
    ) -> None:
        """`load` gives the draft model of a target; steps have up to `samples` samples."""
        self.aux = aux
        self._load, self._machine, self._tables, self._samples = load, machine, tables, samples
        self._model: Model | None = None
        self._ops: Callable[[StepView], Ops] | None = None
        self._rows = DraftRows.of(tables)

    def use_model(self, target: CausalModel | None) -> None:
        """See `Drafter.use_model`. The draft model stays where the target's weights are exchanged: reading it
        again could fail, and then no target would be left to go back to."""
        if target is not None and self._model is not None:
            self._model.retarget(target)
            return
        self._model = None if target is None else self._load(target)

    def use_pool(self, pool: KvPool | None) -> None:
        """See `Drafter.use_pool`."""
        own = None if pool is None else self._machine.make_pool(pool)
        self._machine.attention.bind(own)
        self._ops = None if own is None else self._machine.ops(own)
        if own is not None:
            self._rows = self._rows._replace(page_size=own.page_size)

    def prepare(self, plan: StepPlan) -> None:
        """See `Drafter.prepare`: a new slot's cached tokens have the draft's KV in the same pages."""

    def _context(self, view: StepView) -> ForwardContext:
        assert self._ops is not None, "a step came while the pages are given back"
        self._machine.attention.plan(view)
        return ForwardContext(view.positions, self._ops(view))

    def _ready(self) -> Model:
        assert self._model is not None, "a step came while the weights are given back"
        return self._model
