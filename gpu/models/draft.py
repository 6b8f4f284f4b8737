"""What a drafter and the loader ask of a draft model that reads hidden states of its target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from core.errors import ModelError
from core.models import DraftSpec
from gpu.context import ForwardContext
from gpu.layers import Parameters
from gpu.layers.linear import Linear, Places
from gpu.models.base import CausalModel
from gpu.models.decoder import Layer
from gpu.ops.base import Ops, Part, Rotation


class DraftModel:
    """Uses the embedding and the head of its target where its checkpoint has none. Its layers are numbered
    from 0, as those of its own `KvPool`.

    Owner: launch thread, once built.
    """

    def __init__(
        self, spec: DraftSpec, target: CausalModel, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.spec = spec
        self.token_ids: Tensor | None = None
        """int64 [draft_vocab]: the target's id of each of the draft's; None: the same."""
        parameters = self._parameters = Parameters(dtype, device)
        decoder, own = spec.decoder, spec.own
        self._target = target
        self.embedding = target.embedding
        if "embed_tokens.weight" in own:
            name = "model.embed_tokens.weight"
            self.embedding = parameters.tensor(name, decoder.vocab_size, decoder.hidden)
        self._head: Linear | None = None
        if "lm_head.weight" in own:
            self._head = parameters.linear("", decoder.hidden, {"lm_head": spec.draft_vocab})
        self._offsets: Tensor | None = None
        if "d2t" in own:
            self._offsets = torch.zeros(spec.draft_vocab, dtype=torch.int64, device=device)

    def retarget(self, target: CausalModel) -> None:
        """Draft for `target` from now on, which has other weights than the one before it and is alike."""
        if self.embedding is self._target.embedding:
            self.embedding = target.embedding
        self._target = target

    def fuse(self, aux: Tensor, ops: Ops | None = None) -> Tensor:
        """The draft's input, a new [n, hidden] or `aux` itself, from the target's auxiliary states `aux` [n,
        layers * hidden]; by this step's operations where they are given."""
        return aux

    @property
    def width(self) -> int:
        """Width of the hidden states that the draft reads and makes."""
        return self.spec.decoder.hidden

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the hidden states that the draft reads and makes."""
        return self._parameters.dtype

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, draft_vocab] of hidden states [n, hidden]."""
        return self._target.logits(hidden) if self._head is None else self._head.to_float32(hidden)

    def places(self) -> Places:
        """Every checkpoint name the model wants and the view it fills; none once it is sealed."""
        found = dict(self._parameters.places)
        return found if self._offsets is None else found | {"model.d2t": self._offsets}

    def seal(self) -> None:
        """Called once, after filling and before the first forward: see `CausalModel.seal`. A draft vocabulary
        that is not part of the target's raises `ModelError`."""
        if self._offsets is not None:
            ids = self._offsets + torch.arange(len(self._offsets), device=self._offsets.device)
            low, high, vocab = int(ids.min()), int(ids.max()), self.spec.decoder.vocab_size
            if low < 0 or high >= vocab:
                raise ModelError(f"d2t of the draft model names token {low if low < 0 else high} of {vocab}.")
            self.token_ids, self._offsets = ids, None
        own, shared = self.embedding, self._target.embedding
        if isinstance(own, Tensor) and isinstance(shared, Tensor) and _equal(own, shared):
            self.embedding = shared  # some checkpoints carry a copy: up to a gigabyte
        self._parameters.seal()


def _equal(own: Tensor, shared: Tensor) -> bool:
    return own.shape == shared.shape and own.dtype == shared.dtype and torch.equal(own, shared)


class ChainModel(DraftModel, ABC):
    """Drafts one token after the other: each forward also makes the hidden states that the next one reads."""

    shifted = True

    @abstractmethod
    def forward(self, ctx: ForwardContext, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """`ids` [n] are the tokens that follow each position, `hidden` [n, hidden] is what `fuse` made of the
        target's states or the second of what the last call returned; it is used up. Returns hidden states for
        `logits` and for the next call, [n, hidden] each, which may be one tensor; of `ctx.wanted` alone where
        that is given."""


class Made(NamedTuple):
    """What layers make: `part` is to be added to `residual`, in operations of `ctx`."""

    ctx: ForwardContext
    part: Part | None
    residual: Tensor


def run_behind(
    ctx: ForwardContext, rotation: Rotation, layers: list[Layer], found: Tensor, residual: Tensor
) -> Made:
    """Run the rest of `layers` after the first one's attention, whose output is `found`; the last layer keeps
    only the wanted rows."""
    for layer, after in pairwise(layers):
        part = layer.transform(ctx, found, residual)
        found = after.attend(ctx, rotation, part, residual)
    if ctx.wanted is not None:
        # One row of a long prompt's chunk goes on, or none.
        found, residual = (rows.index_select(0, ctx.wanted) for rows in (found, residual))
        ctx = ForwardContext(ctx.positions, ctx.ops.for_samples())
    return Made(ctx, layers[-1].transform(ctx, found, residual), residual)


class BlockModel(DraftModel, ABC):
    """Drafts a block of tokens in one forward, from K and V that are stored for the context."""

    @abstractmethod
    def store(self, ctx: ForwardContext, hidden: Tensor) -> None:
        """Write K and V of each layer for the context tokens whose fused states are `hidden` [n, hidden]."""

    @abstractmethod
    def forward(self, ctx: ForwardContext, ids: Tensor) -> Tensor:
        """Hidden states [n, hidden] for `logits` of blocks `ids` [n]: a known token, then masks."""
