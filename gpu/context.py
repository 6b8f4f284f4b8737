"""What a layer may ask about the step it runs in. An argument, never a global."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from gpu.embeds import Embedded
from gpu.ops.base import Ops
from gpu.state.recurrent import StepStates

Tail = tuple[Tensor, ...]
"""[num_tokens, width] each: see `CausalModel.tail_widths`."""


class AuxStates(NamedTuple):
    """Hidden states that a draft model reads, of every token of the step.

    layers  whose inputs are kept, in the draft's order; none: the hidden states behind the last norm
    out     [any, max(len(layers), 1) * hidden], filled from its first row on
    """

    layers: tuple[int, ...]
    out: Tensor

    def places(self, layer: int, rows: int) -> list[Tensor]:
        """Where the input of `layer` is kept: [rows, hidden] with strided rows, one for each time that
        `layers` names it."""
        width = self.out.shape[1] // max(len(self.layers), 1)
        columns = [at * width for at, kept in enumerate(self.layers) if kept == layer]
        return [self.out[:rows, at : at + width] for at in columns]


class ForwardContext(NamedTuple):
    """The context of one step's forward.

    positions  integer [num_tokens]
    ops        this step's operations, attention among them
    segments   int64 [num_tokens]: which text of a pair a token is of; None where all are of the first
    wanted     integer [s]: rows whose hidden states a decoder shall return, those of `ops.for_samples()`;
               None for all. Past the last layer's attention no row reads another
    tail       with `wanted`: buffers that the forward fills, for all rows, with the inputs of
               `CausalModel.finish`
    brief      asks a decoder for those layers alone that differ in what they launch: kernels are compiled and
               libraries choose theirs, the result is meaningless
    embedded   rows whose ids are placeholders
    routes     gets what the router of each layer chooses, integers [num_tokens, experts per token]; None
               where no request wants them
    aux        what to keep for a draft model
    states     of linear attention, where layers have it
    """

    positions: Tensor
    ops: Ops
    segments: Tensor | None = None
    wanted: Tensor | None = None
    tail: Tail | None = None
    brief: bool = False
    embedded: Embedded | None = None
    routes: list[Tensor] | None = None
    aux: AuxStates | None = None
    states: StepStates | None = None
