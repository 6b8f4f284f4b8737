"""What the runner and the loader ask of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from core.models import ModelSpec
from gpu.context import ForwardContext, Tail
from gpu.layers import Parameters
from gpu.layers.linear import Places
from gpu.lora import Adaptable
from gpu.ops.base import Ops
from gpu.quant.rows import Table
from gpu.shard import ALONE, Shard, Slices


class CausalModel(ABC):
    """A language model on one device. Weights are uninitialised until filled.

    Owner: launch thread, once built.
    """

    embedding: Table
    """The token embedding, [vocab_size, hidden]."""

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, shard: Shard = ALONE
    ) -> None:
        self.spec = spec
        self._parameters = Parameters(dtype, device, shard)

    @abstractmethod
    def forward(self, ctx: ForwardContext, ids: torch.Tensor) -> torch.Tensor:
        """Hidden states [n, hidden] after the last norm, of token ids [n]; [s, hidden] where
        `ctx.wanted` names s rows."""

    @property
    def tail_widths(self) -> Sequence[int]:
        """Widths of the tensors that `forward` fills in `ctx.tail`. By default there is one, for the hidden
        states themselves."""
        return (self.spec.hidden,)

    def finish(self, ctx: ForwardContext, tail: Tail) -> torch.Tensor:
        """Hidden states [n, hidden] after the last norm of all tokens, computed from the `tail` that
        `forward` filled. May overwrite `tail`."""
        return tail[0]

    @abstractmethod
    def logits(self, hidden: torch.Tensor, ops: Ops | None = None) -> torch.Tensor:
        """float32 [n, vocab_size] of hidden states [n, hidden], [n, classes] of a classifier's. With `ops` as
        the adapters of their rows make them."""

    @property
    def adaptable(self) -> Sequence[Adaptable]:
        """What adapters may change."""
        return self._parameters.adaptable

    def seal(self) -> None:
        """Called once, after filling and before the first forward: the weights are final and may
        be laid out for the device. A tied head becomes a copy where that changes the layout."""
        self._parameters.seal()

    def places(self) -> Places:
        """Every checkpoint name the model wants and the view it fills; none once it is sealed. A tied head
        has no name of its own."""
        return dict(self._parameters.places)

    @property
    def slices(self) -> Slices:
        """Which part of a checkpoint's tensor a place takes, where it is not all of it."""
        return self._parameters.slices
